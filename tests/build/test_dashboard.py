"""Prometheus and Grafana: each metric and label that a panel or an alert names is one that KVStream has, and the other
way round. That Prometheus gets data for them, ``just test-metrics`` shows."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvstream.gateway.metrics import Metrics
from tests.build.recipes import BUILD, recipe
from tests.gateway.conftest import chat, open_rig

HERE = BUILD / "container"
DASHBOARD = recipe("container/dashboard")
RULES = yaml.safe_load((HERE / "alerts.yml").read_text("utf-8"))["groups"][0]["rules"]
# What stands in for Grafana's own variables.
VARIABLES = {"$__rate_interval": "1m", "$backend": ".*"}


def filled(expr: str) -> str:
    for name, value in VARIABLES.items():
        expr = expr.replace(name, value)
    assert "$" not in expr, expr
    return expr


def families(metrics: Metrics) -> Iterator[tuple[str, str, tuple[str, ...]]]:
    """Name, type and labels of each."""
    collectors = {id(each): each for each in metrics.registry._names_to_collectors.values()}
    for each in collectors.values():
        if hasattr(each, "_labelnames"):
            yield each._name, each._type, tuple(each._labelnames)
    for family in metrics._lanes.collect():
        yield family.name, family.type, tuple(family._labelnames)


def samples(metrics: Metrics) -> dict[str, set[str]]:
    """Each name that can be asked for, with its labels."""
    ends = {"counter": ("_total",), "gauge": ("",), "histogram": ("_bucket", "_sum", "_count")}
    return {f"{name}{end}": {*labels, *(["le"] if end == "_bucket" else [])}
            for name, kind, labels in families(metrics) for end in ends[kind]}


def named(expr: str) -> Iterator[tuple[str, set[str]]]:
    """The metrics in an expression, each with the labels that are asked of it."""
    for name, labels in re.findall(r"\b(kvstream_\w+)(?:\{([^}]*)\})?", expr):
        yield name, set(re.findall(r"(\w+)\s*(?:=~|!~|!=|=)", labels))


async def test_every_metric_and_label_that_is_named_exists() -> None:
    known = samples(Metrics())
    assert len(known) > 60
    rules = [(rule["alert"], rule["expr"]) for rule in RULES]
    for where, expr in [(each.panel, each.expr) for each in DASHBOARD.expressions()] + rules:
        asked = list(named(expr))
        assert asked or expr.startswith("up{"), (where, expr)
        there: set[str] = set()
        for name, labels in asked:
            assert name in known, (where, name)
            assert labels <= known[name], (where, name, labels)
            there |= known[name]
        for group in re.findall(r"\bby \(([^)]*)\)", expr):
            assert set(re.split(r",\s*", group)) <= there, (where, group)


async def test_the_names_of_lines_are_labels_that_are_left() -> None:
    known = samples(Metrics())
    for each in DASHBOARD.expressions():
        kept = re.findall(r"\bby \(([^)]*)\)", each.expr)
        left = set(re.split(r",\s*", kept[0])) if kept else {
            label for name, _ in named(each.expr) for label in known[name]} if "sum" not in each.expr else set()
        assert set(re.findall(r"\{\{(\w+)\}\}", each.legend)) <= left, each


async def test_every_family_is_shown() -> None:
    shown = {name for each in DASHBOARD.expressions() for name, _ in named(each.expr)}
    ends = {"counter": "_total", "gauge": "", "histogram": "_bucket"}
    missing = {f"{name}{ends[kind]}" for name, kind, _ in families(Metrics())} - shown
    assert not missing, "give them a place in build/container/dashboard.py, then `just dashboard`"


def test_the_dashboard_is_that_of_its_table() -> None:
    made = DASHBOARD.text()
    assert made == (HERE / "grafana" / "dashboards" / "kvstream.json").read_text("utf-8"), "run: just dashboard"
    board = json.loads(made)
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])
    taken: set[tuple[int, int]] = set()
    for panel in board["panels"]:
        at = panel["gridPos"]
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert not cells & taken and at["x"] + at["w"] <= 24, panel["title"]
        taken |= cells


def test_provisioning_and_dashboard_fit_together() -> None:
    def read(name: str) -> Any:
        return yaml.safe_load((HERE / name).read_text("utf-8"))

    grafana = read("compose.yaml")["services"]["grafana"]
    mounted = dict(volume.split(":")[:2] for volume in grafana["volumes"])
    (provider,) = read("grafana/provisioning/dashboards/kvstream.yml")["providers"]
    assert provider["options"]["path"] == mounted["./grafana/dashboards"]
    assert grafana["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"] == (
        f"{mounted['./grafana/dashboards']}/kvstream.json")
    (source,) = read("grafana/provisioning/datasources/prometheus.yml")["datasources"]
    config = read("prometheus.yml")
    assert source["url"] == "http://prometheus:9090" and source["isDefault"] is True
    assert source["jsonData"]["timeInterval"] == config["global"]["scrape_interval"]
    (job,) = config["scrape_configs"]
    assert job["job_name"] == "kvstream" and job["static_configs"] == [{"targets": ["kvstream:8080"]}]


# --- with Prometheus' own tool ----------------------------------------------------------------------------------------


def promtool(*words: str | Path, given: bytes = b"") -> str:
    if shutil.which("promtool") is None:
        pytest.skip("promtool is not installed (Debian's package prometheus has it)")
    done = subprocess.run(["promtool", *words], input=given, capture_output=True, timeout=60)
    said = (done.stdout + done.stderr).decode()
    assert done.returncode == 0, said
    return said


def test_promtool_accepts_the_configuration() -> None:
    assert f"{len(RULES)} rules found" in promtool("check", "config", HERE / "prometheus.yml")


def test_promtool_can_read_every_expression(tmp_path: Path) -> None:
    rules = [{"record": f"panel:{n}", "expr": filled(each.expr)} for n, each in enumerate(DASHBOARD.expressions())]
    file = tmp_path / "panels.yml"
    file.write_text(json.dumps({"groups": [{"name": "panels", "rules": rules}]}), "utf-8")
    assert f"{len(rules)} rules found" in promtool("check", "rules", file)


async def test_promtool_likes_what_is_scraped() -> None:
    async with open_rig() as rig:
        response = await rig.post(chat())
        await response.read_all()
        await response.close()
        status, body, _ = await rig.get("/metrics")
    assert status == 200 and b'kvstream_requests_total{outcome="served"' in body
    promtool("check", "metrics", given=body)


# Series that bring an alert about, as promtool writes them (a value, times a number of minutes), and when it is there.
FIRING: dict[str, tuple[dict[str, str], str]] = {
    "KVStreamDown": ({'up{job="kvstream"}': "0x9"}, "1m"),
    "KVStreamBackendAway": ({'kvstream_backend_state{backend="a",state="wedged"}': "1x9"}, "2m"),
    "KVStreamBreakerOpen": ({'kvstream_breaker_state{backend="a",state="closed"}': "0x9"}, "2m"),
    "KVStreamConfigNotInForce": ({"kvstream_config_ok": "0x9"}, "1m"),
    "KVStreamPagesOverdrawn": ({'kvstream_pages{backend="a",tier="device",state="overdrawn"}': "3x9"}, "5m"),
    "KVStreamWaitsLong": ({'kvstream_queue_wait_seconds_bucket{le="60.0"}': "0+1x15",
                           'kvstream_queue_wait_seconds_bucket{le="120.0"}': "0+9x15",
                           'kvstream_queue_wait_seconds_bucket{le="+Inf"}': "0+9x15"}, "9m"),
    "KVStreamRefuses": ({'kvstream_requests_total{outcome="refused"}': "0+1x15",
                         'kvstream_requests_total{outcome="served"}': "0+9x15"}, "9m"),
    "KVStreamSavingOff": ({'kvstream_inject_saving{backend="a"}': "0x30"}, "15m"),
}


def test_alerts_come_when_they_should_and_not_before(tmp_path: Path) -> None:
    assert set(FIRING) == {rule["alert"] for rule in RULES}
    tests: list[dict[str, Any]] = []
    for name, (series, after) in FIRING.items():
        given = [{"series": each, "values": values} for each, values in series.items()]
        labels = {key: word for each in series for key, word in re.findall(r'(\w+)="([^"]*)"', each)
                  if name in ("KVStreamDown", "KVStreamBackendAway", "KVStreamBreakerOpen", "KVStreamPagesOverdrawn",
                              "KVStreamSavingOff")}
        (rule,) = (rule for rule in RULES if rule["alert"] == name)
        come = {"exp_labels": {**labels, **rule["labels"]}}
        # The texts of the annotations are templates; promtool compares them filled in, so here they are left out.
        tests.append({"interval": "1m", "input_series": given, "alert_rule_test": [
            {"eval_time": after, "alertname": name, "exp_alerts": [come]},
            {"eval_time": "0m", "alertname": name, "exp_alerts": []}]})
    rules = tmp_path / "alerts.yml"
    bare = [{key: value for key, value in rule.items() if key != "annotations"} for rule in RULES]
    rules.write_text(json.dumps({"groups": [{"name": "kvstream", "rules": bare}]}), "utf-8")
    file = tmp_path / "tests.yml"
    file.write_text(json.dumps({"rule_files": [str(rules)], "evaluation_interval": "1m", "tests": tests}), "utf-8")
    assert "SUCCESS" in promtool("test", "rules", file)
