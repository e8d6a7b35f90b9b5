"""``just dashboard``: the Grafana dashboard, from the table below.

    python build/container/dashboard.py [FILE]

Writes grafana/dashboards/kvstream.json, which is checked in: whoever takes only that file can import it, into a Grafana
of 10 or newer with any Prometheus. The table is what is edited; tests/build/test_dashboard.py compares the two, and
looks each name up in the registry of kvstream/gateway/metrics.py. One panel, one unit.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from attrs import frozen

FILE = Path(__file__).resolve().parent / "grafana" / "dashboards" / "kvstream.json"
WIDTH, HEIGHT, ACROSS = 24, 8, 3
SOURCE = {"type": "prometheus", "uid": "${datasource}"}
# In labels: which backend, as chosen above the panels. Families of the whole process have no such label.
OF = 'backend=~"$backend"'


@frozen
class Panel:
    """``queries``: what is drawn, and what each line is called. ``stack``: the lines are parts of a whole."""

    title: str
    unit: str
    queries: tuple[tuple[str, str], ...]
    about: str = ""
    stack: bool = False
    kind: str = "timeseries"


def rate(name: str, by: str = "", labels: str = "") -> str:
    chosen = f"{{{labels}}}" if labels else ""
    return f"sum{f' by ({by})' if by else ''} (rate({name}{chosen}[$__rate_interval]))"


def quantiles(name: str, labels: str = "") -> tuple[tuple[str, str], ...]:
    inner = rate(f"{name}_bucket", "le", labels)
    return tuple((f"histogram_quantile({q}, {inner})", f"p{q * 100:.0f}") for q in (0.5, 0.95, 0.99))


def share(of: str, whole: str) -> str:
    return f"{of} / ({whole} > 0)"


PAGES = f'kvstream_pages{{{OF},tier="device",state="%s"}}'
READ = f'{OF},part="%s"'

ROWS: tuple[tuple[str, tuple[Panel, ...]], ...] = (
    ("Now", (
        Panel("Backends", "none", ((f"max by (backend, state) (kvstream_backend_state{{{OF}}}) == 1",
                                    "{{backend}}: {{state}}"),), kind="stat"),
        Panel("Running, of seats", "none", (
            (f'sum(kvstream_seats{{{OF},state="used"}})', "running"),
            (f'sum(kvstream_seats{{{OF},state="total"}})', "seats"),
            (f"sum(kvstream_queue_length{{{OF}}})", "waiting")), kind="stat"),
        Panel("The process", "none", (('up{job="kvstream"}', "up"), ("kvstream_config_ok", "configuration in force"),
                                      ("kvstream_open_connections", "connections")), kind="stat"),
    )),
    ("Requests", (
        Panel("Requests by how they ended", "reqps", ((rate("kvstream_requests_total", "outcome"), "{{outcome}}"),),
              stack=True),
        Panel("Turned away and gone", "reqps", ((rate("kvstream_refused_total", "reason"), "refused: {{reason}}"),
                                                (rate("kvstream_cancelled_total", "phase"), "left while {{phase}}"))),
        Panel("Failures of backends", "reqps", (
            (rate("kvstream_backend_errors_total", "kind"), "{{kind}}"), (rate("kvstream_failovers_total"), "moved on"),
            (rate("kvstream_busy_retries_total"), "busy, asked again"), (rate("kvstream_wedged_total"), "hangs"),
            (rate("kvstream_unfinished_streams_total"), "no finish_reason"),
            (rate("kvstream_slots_not_idle_total"), "slot not idle after a cancel"))),
        Panel("To the first token", "s", quantiles("kvstream_ttft_seconds"), "From the request's arrival, its wait in "
              "the queue included."),
        Panel("Between tokens", "s", quantiles("kvstream_inter_token_seconds"), "The mean of a request."),
        Panel("To the last byte", "s", quantiles("kvstream_request_seconds"), "Of served requests."),
    )),
    ("Queue and seats", (
        Panel("Waiting", "none", ((f"sum by (backend) (kvstream_queue_length{{{OF}}})", "{{backend}}"),
                                  (f"sum by (why) (kvstream_queue_held{{{OF}}}) > 0", "held: {{why}}"),
                                  (f"sum(kvstream_swapped_out{{{OF}}})", "preempted, in a file")),
              "Held: waits for more than a seat."),
        Panel("Wait in the queue", "s", quantiles("kvstream_queue_wait_seconds"), "Also of those refused or gone."),
        Panel("Seats", "none", tuple(
            (f'sum by (backend) (kvstream_seats{{{OF},state="{state}"}})', f"{{{{backend}}}} {state}")
            for state in ("total", "used", "draining")), "Draining: the request is over, its slot is not idle yet."),
        Panel("Bytes held", "bytes", ((f"sum by (backend) (kvstream_queue_bytes{{{OF}}})", "waiting: {{backend}}"),
                                      ("kvstream_response_cache_bytes", "answers kept"))),
        Panel("Had to wait for more than a seat", "reqps", ((rate("kvstream_held_total", "why", OF), "{{why}}"),)),
        Panel("After a cancel, until the slot is idle", "s", quantiles("kvstream_slot_drain_seconds")),
    )),
    ("Tokens and pages", (
        Panel("Tokens per second", "none", ((rate("kvstream_prompt_tokens_total"), "prompt"),
                                            (rate("kvstream_answer_tokens_total"), "answer"))),
        Panel("KV pages of the device", "none", tuple((f"sum({PAGES % state})", state) for state in (
            "total", "held", "cached", "promised", "overdrawn")), "Cached is part of held; promised pages are free or "
            "cached still. Overdrawn: nobody enters."),
        Panel("Prompt tokens found in a cache", "percentunit", (
            (share(rate("kvstream_prefix_tokens_verified_total"), rate("kvstream_prompt_tokens_total")),
             "verified by the backend"),
            (share(rate("kvstream_prefix_tokens_accounted_total"), rate("kvstream_prompt_tokens_total")), "expected"))),
        Panel("Prompts by how they were counted", "reqps", (
            (rate("kvstream_prompts_counted_total", "source"), "{{source}}"),)),
        Panel("Requests without a call of their own", "reqps", (
            (rate("kvstream_coalesced_total"), "shared one that ran"),
            (rate("kvstream_response_cache_total", "result"), "answer cache: {{result}}"))),
        Panel("Prompt tokens kept for reuse", "none", (
            (f"sum by (backend) (kvstream_prefix_tokens{{{OF}}})", "{{backend}}"),)),
    )),
    ("Saved KV (llama.cpp)", (
        Panel("Where prompts were found", "reqps", ((rate("kvstream_inject_admissions_total", "how", OF), "{{how}}"),),
              stack=True),
        Panel("Prompt tokens that the runtime read", "none", (
            (rate("kvstream_runtime_prompt_tokens_total", labels=READ % "computed"), "computed"),
            (rate("kvstream_runtime_prompt_tokens_total", labels=READ % "cached"), "cached")), stack=True),
        Panel("Promises kept", "percentunit", (
            (share(rate("kvstream_inject_kept_tokens_total", labels=OF),
                   rate("kvstream_inject_promised_tokens_total", labels=OF)), "of the tokens"),),
              "Prompt tokens that the runtime was promised to hold, and then did."),
        Panel("Saves and restores", "ops", (
            (rate("kvstream_inject_saves_total", "why, outcome", OF), "save: {{why}}, {{outcome}}"),
            (rate("kvstream_inject_restores_total", "outcome", OF), "restore: {{outcome}}"))),
        Panel("Bytes moved", "Bps", ((rate("kvstream_inject_save_bytes_total", labels=OF), "saved"),
                                     (rate("kvstream_inject_restore_bytes_total", labels=OF), "restored"))),
        Panel("Share of the time spent moving", "percentunit", (
            (rate("kvstream_inject_save_seconds_total", labels=OF), "saving"),
            (rate("kvstream_inject_restore_seconds_total", labels=OF), "restoring")),
            "All streams of the runtime stand still meanwhile."),
        Panel("On disk", "bytes", ((f"sum by (backend) (kvstream_inject_store_bytes{{{OF}}})", "{{backend}}"),)),
        Panel("Files on disk", "none", ((f"sum by (backend) (kvstream_inject_store_files{{{OF}}})", "{{backend}}"),)),
        Panel("Deleted, lost, off", "ops", (
            (rate("kvstream_inject_store_evictions_total", "why", OF), "deleted: {{why}}"),
            (rate("kvstream_inject_slots_lost_total", "why", OF), "slots lost: {{why}}"),
            (rate("kvstream_inject_saving_off_total", "why", OF), "saving went off: {{why}}"),
            (rate("kvstream_restore_ineffective_total", labels=OF), "restore without effect"))),
        Panel("Preemption", "reqps", (
            (rate("kvstream_preemptions_total", "how", OF), "gave way: {{how}}"),
            (rate("kvstream_preempted_resumed_total", labels=OF), "went on"))),
    )),
    ("States over time", (
        Panel("Backend", "none", ((f"kvstream_backend_state{{{OF}}} == 1", "{{backend}} {{state}}"),),
              kind="state-timeline"),
        Panel("Breaker", "none", ((f"kvstream_breaker_state{{{OF}}} == 1", "{{backend}} {{state}}"),),
              "Open: it failed again and again, and is left alone for a while.", kind="state-timeline"),
        Panel("Saved KV", "none", ((f"kvstream_inject_mode{{{OF}}} == 1", "{{backend}} {{mode}}"),
                                   (f"kvstream_inject_saving{{{OF}}} == 0", "{{backend}} saves nothing now")),
              kind="state-timeline"),
    )),
)


def target(number: int, expr: str, legend: str, instant: bool) -> dict[str, Any]:
    return {"refId": chr(ord("A") + number), "datasource": SOURCE, "expr": expr, "legendFormat": legend,
            "instant": instant, "range": not instant}


def drawn(panel: Panel, number: int, x: int, y: int) -> dict[str, Any]:
    lines = panel.kind == "timeseries"
    custom: dict[str, Any] = {"fillOpacity": 10, "showPoints": "never", "stacking": {
        "mode": "normal" if panel.stack else "none"}} if lines else {}
    options: dict[str, Any] = {
        "timeseries": {"legend": {"displayMode": "list", "placement": "bottom"}, "tooltip": {"mode": "multi"}},
        "stat": {"textMode": "value_and_name", "reduceOptions": {"calcs": ["lastNotNull"]}},
        "state-timeline": {"mergeValues": True, "showValue": "never"},
    }[panel.kind]
    return {
        "id": number, "type": panel.kind, "title": panel.title, "description": panel.about, "datasource": SOURCE,
        "gridPos": {"x": x, "y": y, "w": WIDTH // ACROSS, "h": HEIGHT},
        "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0, "custom": custom}, "overrides": []},
        "options": options,
        "targets": [target(n, expr, legend, panel.kind == "stat") for n, (expr, legend) in enumerate(panel.queries)],
    }


def panels() -> list[dict[str, Any]]:
    made: list[dict[str, Any]] = []
    y = 0
    for title, row in ROWS:
        made.append({"id": len(made) + 1, "type": "row", "title": title, "collapsed": False, "panels": [],
                     "gridPos": {"x": 0, "y": y, "w": WIDTH, "h": 1}})
        y += 1
        for n, panel in enumerate(row):
            made.append(drawn(panel, len(made) + 1, n % ACROSS * (WIDTH // ACROSS), y + n // ACROSS * HEIGHT))
        y += -(-len(row) // ACROSS) * HEIGHT
    return made


def dashboard() -> dict[str, Any]:
    backend = {"name": "backend", "type": "query", "datasource": SOURCE, "includeAll": True, "allValue": ".*",
               "multi": True, "refresh": 2, "sort": 1, "current": {"text": ["All"], "value": ["$__all"]},
               "query": {"query": "label_values(kvstream_backend_state, backend)", "refId": "backend"}}
    source = {"name": "datasource", "type": "datasource", "query": "prometheus", "label": "Prometheus"}
    return {"uid": "kvstream", "title": "KVStream", "tags": ["kvstream"], "schemaVersion": 39, "editable": True,
            "time": {"from": "now-1h", "to": "now"}, "refresh": "10s", "timezone": "",
            "templating": {"list": [source, backend]}, "annotations": {"list": []}, "panels": panels()}


def text() -> str:
    """JSON, a panel to a line: what changed in one is one line of a diff."""
    head, _, tail = json.dumps(dashboard() | {"panels": ["@"]}, indent=1).partition('  "@"')
    return head + ",\n".join(f"  {json.dumps(panel)}" for panel in panels()) + tail + "\n"


@frozen
class Drawn:
    """A query of a panel."""

    panel: str
    expr: str
    legend: str


def expressions() -> list[Drawn]:
    """What is in the file that is checked in."""
    panels = json.loads(FILE.read_text("utf-8"))["panels"]
    return [Drawn(panel["title"], each["expr"], each["legendFormat"])
            for panel in panels for each in panel.get("targets", ())]


def main() -> None:
    file = Path(sys.argv[1]) if len(sys.argv) > 1 else FILE
    file.write_text(text(), "utf-8")


if __name__ == "__main__":
    main()
