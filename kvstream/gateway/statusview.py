"""``kvstream status`` and ``kvstream health``: a running KVStream seen from a terminal.

Written against ``GET /status`` but tolerant of it: a missing or unknown field leaves a gap, never an error, so that a
client of one version can look at a server of another. Texts from the server are shown as plain characters: a model's
name must not be able to steer the terminal.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from typing import Any

import click
import httpx
from attrs import frozen
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.live import Live
from rich.table import Table
from rich.text import Text

from ..errors import BackendUnavailableError, ConfigError, KVStreamError
from .alive import ELSEWHERE, VERSION_HEADER
from .statusview_inject import inject_parts
from .statusview_lines import Labelled, labelled

LOOK_EVERY_S = 1.0
LOOK_TIMEOUT_S = 5.0
MODELS_MAX = 4  # of a backend
ROWS_MAX = 20  # of the queue and of the running requests; a terminal is not a log
WAITING_COLUMNS = ("position", "id", "age_s", "tokens", "produced", "counted", "priority", "why")
RUNNING_COLUMNS = ("id", "phase", "state", "age_s", "tokens", "produced", "pages", "cached", "counted", "priority")
FIRST_TO_GO = ("counted", "priority", "cached", "pages", "state")  # where a terminal is too narrow for all
PAGE_COLUMNS = ("total", "free", "held", "cached", "promised", "overdrawn")
PAGES_READ = "cached is part of held; promised is part of free and cached"  # a row of numbers asks to be summed


def check_url(url: str) -> None:
    """*Errors*: ConfigError for something that is no http(s) URL (exit code 2, as for any wrong option)."""
    try:
        parsed = httpx.URL(url)
        usable = parsed.scheme in ("http", "https") and bool(parsed.host)
    except (httpx.InvalidURL, ValueError):
        usable = False
    if not usable:
        raise ConfigError(f"--url must be a URL such as http://127.0.0.1:8080, not {url!r}")


def open_client(url: str, key: str = "") -> httpx.Client:
    """A client for one KVStream that shows ``key``; proxies of the environment are not asked, since this is usually
    loopback."""
    headers = {"authorization": f"Bearer {key}"} if key else {}
    return httpx.Client(base_url=url.rstrip("/"), headers=headers, timeout=LOOK_TIMEOUT_S, trust_env=False)


def get(client: httpx.Client, path: str) -> httpx.Response:
    """*Errors*: BackendUnavailableError in words a person can use."""
    url = str(client.base_url).rstrip("/")
    try:
        return client.get(path)
    except httpx.ConnectError as error:
        raise BackendUnavailableError(
            f"nothing answers at {url}. Is `kvstream serve` running there? {ELSEWHERE}") from error
    except httpx.TimeoutException as error:
        raise BackendUnavailableError(f"{url} did not answer within {LOOK_TIMEOUT_S:g} seconds.") from error
    except httpx.HTTPError as error:
        raise BackendUnavailableError(f"{url} does not answer properly: {error}") from error


def fetch(client: httpx.Client) -> Mapping[str, Any]:
    """One snapshot. *Errors*: KVStreamError when there is none to be had."""
    reply = get(client, "/status")
    try:
        snapshot = reply.json()
    except (ValueError, RecursionError):
        snapshot = None
    if reply.status_code != 200 or not isinstance(snapshot, dict):
        url = str(client.base_url).rstrip("/")
        if reply.status_code in (401, 403) and VERSION_HEADER in reply.headers:
            raise KVStreamError(
                f"{url} does not show its /status: {_reason(reply)}. A key is taken from KVSTREAM_KEY, else "
                "auth.metrics_token of the configuration.")
        raise KVStreamError(f"{url} answers {reply.status_code} on /status, which is not a KVStream's snapshot.")
    return snapshot


def show_once(url: str, as_json: bool, key: str = "") -> int:
    with open_client(url, key) as client:
        snapshot = fetch(client)
    if as_json:
        click.echo(json.dumps(snapshot, indent=2))
    else:
        Console(highlight=False).print(render(snapshot))
    return 0


def watch(url: str, as_json: bool, key: str = "") -> int:
    """Look until interrupted. A server that goes away is waited for, on a terminal and for JSON also one that is not
    there yet. *Errors*: elsewhere, KVStreamError when the first look fails: nobody may be there to see a mistake."""
    console = Console(highlight=False)
    with open_client(url, key) as client:
        if as_json:
            while True:
                click.echo(json.dumps(_look(client)))
                time.sleep(LOOK_EVERY_S)
        if not console.is_terminal or console.is_dumb_terminal:  # where Live prints nothing before its end
            return _watch_plainly(client, console)
        with Live(Text("looking ..."), auto_refresh=False, console=console) as live:
            while True:
                live.update(render(_look(client)), refresh=True)
                time.sleep(LOOK_EVERY_S)


def _watch_plainly(client: httpx.Client, console: Console) -> int:
    """One snapshot below the other, each with its time. Rich flushes after each print."""
    snapshot = fetch(client)
    while True:
        console.print(Text(time.strftime("%Y-%m-%d %H:%M:%S")), render(snapshot), "", sep="\n")
        time.sleep(LOOK_EVERY_S)
        snapshot = _look(client)


def _look(client: httpx.Client) -> Mapping[str, Any]:
    try:
        return fetch(client)
    except KVStreamError as error:
        return {"error": error.message}


def health_line(url: str) -> str:
    """One sentence about liveness and readiness. *Errors*: KVStreamError unless it is alive *and* ready."""
    with open_client(url) as client:
        alive = get(client, "/health")
        ready = get(client, "/ready")
    if VERSION_HEADER not in alive.headers:
        raise KVStreamError(f"{url} answers, but that is not a KVStream.")
    if alive.status_code != 200:
        raise KVStreamError(f"{url} answers {alive.status_code} on /health: not healthy.")
    if ready.status_code != 200:
        raise KVStreamError(f"{url} is alive but not ready: {_reason(ready)}")
    return f"{url} is alive and ready{_not_up(ready)}."


def _not_up(ready: httpx.Response) -> str:
    """Those of several backends that are not up."""
    try:
        lanes = _table(ready.json(), "lanes")
    except (ValueError, RecursionError, AttributeError):
        return ""
    away = [f"{_plain(name)} ({_plain(state)})" for name, state in lanes.items() if state not in ("up", "sleeping")]
    return f"; not up: {', '.join(away)}" if away else ""


def _reason(reply: httpx.Response) -> str:
    try:
        body = reply.json()
    except (ValueError, RecursionError):
        body = None
    if isinstance(body, dict):
        error = body.get("error")
        for reason in (error.get("message") if isinstance(error, dict) else error, body.get("reason"),
                       body.get("state"), body.get("status")):
            if isinstance(reason, str) and reason:
                return _plain(reason)
    return f"status {reply.status_code}"


# --- rendering --------------------------------------------------------------------------------------------------------


def render(snapshot: Mapping[str, Any]) -> RenderableType:
    """A snapshot as tables."""
    if "error" in snapshot:
        return Text(_plain(snapshot["error"]), style="red")
    lanes = [lane for lane in _list(snapshot, "lanes") if isinstance(lane, dict)]
    troubles = _config_troubles(_table(snapshot, "config"))
    if len(lanes) < 2:
        return Group(_headline(snapshot), *troubles, *_lane_parts(snapshot), *_sharing(snapshot))
    parts: list[RenderableType] = [Text.assemble(("KVStream ", "bold"), _n(snapshot, "version")), *troubles,
                                     _overview(lanes)]
    for lane in lanes:
        title = Text.assemble("\n", (_n(lane, "name"), "bold"), "  ", _n(lane, "state"))
        detail = _table(lane, "backend").get("detail")
        if detail:
            title.append(f" ({_plain(detail)})", style="yellow")
        parts += [title, *_lane_parts(lane)]
    return Group(*parts, *_sharing(snapshot))


def _sharing(snapshot: Mapping[str, Any]) -> list[RenderableType]:
    """Requests without a call of their own, over all lanes; nothing while there were none."""
    counts = {name: count for name, count in _table(snapshot, "sharing").items() if count}
    told = ", ".join(f"{_plain(name)} {_plain(count)}" for name, count in counts.items())
    return [Text(f"sharing   {told}")] if told else []


def _config_troubles(config: Mapping[str, Any]) -> list[RenderableType]:
    """Why the configuration file is not what is in force."""
    found: list[RenderableType] = []
    if config.get("error"):
        found.append(Text(f"config    not in force: {_plain(config['error'])}", style="red"))
    if _list(config, "restart"):
        paths = ", ".join(_plain(path) for path in _list(config, "restart"))
        found.append(Text(f"config    restart to apply: {paths}", style="yellow"))
    return found


def _overview(lanes: Sequence[Mapping[str, Any]]) -> Table:
    """One row per lane."""
    table = Table(title="backends", title_justify="left")
    for column in ("name", "kind", "url", "state", "seats", "waiting", "models"):
        table.add_column(column, overflow="fold", justify="right" if column in ("seats", "waiting") else "left")
    for lane in lanes:
        backend, seats, models = _table(lane, "backend"), _table(lane, "seats"), _list(lane, "models")
        shown = ", ".join(_plain(model) for model in models[:MODELS_MAX])
        more = f" and {len(models) - MODELS_MAX} more" if len(models) > MODELS_MAX else ""
        cells = (_n(lane, "name"), _n(backend, "kind"), _n(backend, "url"), _n(lane, "state"),
                 f"{_n(seats, 'used')}/{_n(seats, 'total')}", _n(_table(lane, "queue"), "length"), shown + more)
        table.add_row(*(Text(cell) for cell in cells))
    return table


def _lane_parts(snapshot: Mapping[str, Any]) -> list[RenderableType]:
    """All about one lane but where it is."""
    capacity, seats, queue = (_table(snapshot, name) for name in ("capacity", "seats", "queue"))
    parts: list[RenderableType] = [_capacity(capacity, _table(snapshot, "backend")),
                                     *_alternating(_list(snapshot, "options_alternate")),
                                     *_hygiene(_list(_table(snapshot, "prefix_hygiene"), "findings"))]
    if capacity:
        parts.append(Text(f"seats     {_n(seats, 'used')} of {_n(seats, 'total')} used, "
                          f"{_n(seats, 'draining')} draining"))
    parts.append(Text(f"queue     {_n(queue, 'length')} waiting, {_n(queue, 'bytes')} bytes"))
    prefixes = _table(snapshot, "prefixes")
    parts.append(Text(f"prefixes  {_n(prefixes, 'nodes')} nodes, {_n(prefixes, 'tokens')} tokens"))
    parts += inject_parts(_table(snapshot, "inject"))
    pages = _table(snapshot, "pages")
    if capacity and pages:
        parts += [_pages(pages), Text(PAGES_READ)]
    parts.extend(_rows("waiting", _list(queue, "requests"), WAITING_COLUMNS, queue.get("length")))
    parts.extend(_rows("running", _list(snapshot, "running"), RUNNING_COLUMNS, seats.get("used")))
    counters = _table(snapshot, "counters")
    if counters:
        parts.append(labelled("counters", ", ".join(f"{_plain(name)} {_count(count)}"
                                                    for name, count in counters.items())))
    return parts


def _count(count: Any) -> str:
    """A counter, or counters by reason: their sum, and those that are not 0."""
    if not isinstance(count, dict):
        return _plain(count)
    whys = ", ".join(f"{_plain(why)} {_plain(number)}" for why, number in count.items() if number)
    total = sum(number for number in count.values() if isinstance(number, int))
    return f"{total} ({whys})" if whys else f"{total}"


def _headline(snapshot: Mapping[str, Any]) -> Text:
    backend = _table(snapshot, "backend")
    line = Text.assemble(("KVStream ", "bold"), _n(snapshot, "version"), "  ", (_n(snapshot, "state"), "bold"))
    line.append(f"\nbackend   {_n(backend, 'kind')} {_n(backend, 'url')}: {_n(backend, 'state')}")
    if backend.get("detail"):
        line.append(f" ({_n(backend, 'detail')})", style="yellow")
    return line


def _capacity(capacity: Mapping[str, Any], backend: Mapping[str, Any]) -> Labelled:
    if not capacity:
        return labelled("capacity", "not known yet")
    was = "as last known, " if backend.get("state") in ("loading", "down", "failed") else ""
    most = capacity.get("request_tokens_max")
    bound = "" if most is None else f", at most {_n(capacity, 'request_tokens_max')} tokens a request"
    line = Text(f"{was}{_n(capacity, 'mode')}: {_n(capacity, 'seats')} seats, {_n(capacity, 'pages')} pages "
                f"of {_n(capacity, 'page_tokens')} tokens{bound} (from {_n(capacity, 'source')})")
    for note in _list(capacity, "notes"):
        line.append(f"\nnote: {_plain(note)}", style="yellow")
    return Labelled("capacity", line)


def _alternating(rows: Sequence[Any]) -> list[RenderableType]:
    return [Text(f"warning   {_plain(row.get('warning'))}", style="yellow") for row in rows if isinstance(row, Mapping)]


def _hygiene(rows: Sequence[Any]) -> list[RenderableType]:
    """What keeps prompts from sharing their prefix."""
    return [Text(f"warning   {_n(row, 'text')}: {_n(row, 'tokens_lost')} tokens read again each time, seen "
                 f"{_n(row, 'requests')} times; {_n(row, 'remedy')}", style="yellow")
            for row in rows if isinstance(row, Mapping)]


def _pages(pages: Mapping[str, Any]) -> Table:
    # The host tier is configured before anything can use it; a row of it would be taken for memory in use.
    tiers = [tier for tier in pages if tier != "host" or _table(pages, tier).get("held")]
    columns = [column for column in PAGE_COLUMNS if any(column in _table(pages, tier) for tier in tiers)]
    table = Table(title="pages", title_justify="left")
    table.add_column("tier")
    for column in columns:
        table.add_column(column, justify="right")
    for tier in tiers:
        counts = _table(pages, tier)
        table.add_row(_plain(tier), *(Text(_n(counts, column)) for column in columns))
    return table


def _rows(title: str, rows: Sequence[Any], columns: tuple[str, ...], total: Any) -> list[RenderableType]:
    """A table of requests with those of ``columns`` that occur; nothing when there are no rows. ``total`` is how many
    there are, since the server does not list them all."""
    shown = [row for row in rows[:ROWS_MAX] if isinstance(row, dict)]
    present = [column for column in columns if any(column in row for row in shown)]
    if not present:
        return []
    more = max(len(rows), total if isinstance(total, int) else 0) - len(shown)
    table = _Requests(title, present, shown)
    return [table, Text(f"... and {more} more")] if more > 0 else [table]


@frozen
class _Requests:
    """Requests in the width there is: columns go before an id is cut, by which rows are told apart."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Mapping[str, Any]]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        cells = {column: [_n(row, column) for row in self.rows] for column in self.columns}
        widths = {column: max(map(cell_len, (column, *cells[column]))) + 3 for column in self.columns}  # and borders
        for column in FIRST_TO_GO:
            if sum(widths[kept] for kept in cells) < options.max_width:
                break
            cells.pop(column, None)
        table = Table(title=self.title, title_justify="left")
        for column in cells:
            table.add_column(column, justify="right", overflow="fold")
        for row in zip(*cells.values(), strict=True):
            table.add_row(*map(Text, row))
        yield table


def _table(of: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = of.get(name)
    return value if isinstance(value, dict) else {}


def _list(of: Mapping[str, Any], name: str) -> Sequence[Any]:
    value = of.get(name)
    return value if isinstance(value, list) else []


def _n(of: Mapping[str, Any], name: str) -> str:
    """A value for a person; a dash when it is missing."""
    value = of.get(name)
    if value is None:
        return "-"
    return f"{value:.1f}" if isinstance(value, float) else _plain(value)


def _plain(value: Any) -> str:
    """Text without control characters: an escape sequence in a model's name is shown, not executed."""
    return "".join(char if char.isprintable() else "\N{REPLACEMENT CHARACTER}" for char in str(value))
