"""What ``just gpu`` found, for people: a table of its steps, and one of each kind of figure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.table import Table

GIB, MIB = 1 << 30, 1 << 20
WARNING = "SIMULATED DRIVER, NOT A GPU: this run tested the script; where a figure would be, there is a dash"


def show(report: Mapping[str, Any], console: Console | None = None) -> None:
    console = console or Console(width=None if Console().is_terminal else 120)
    parts = {name: step["parts"] for name, step in report["steps"].items()}
    device = parts.get("device", {}).get("device", {})
    console.rule()
    if report["simulated"]:
        console.print(WARNING, markup=False)
    console.print(f"{device.get('name', 'no device')}, commit {(report['about']['commit'] or '?')[:12]}"
                  f"{' with changes' if report['about']['changed'] else ''}, {report['about']['time']}", markup=False)
    console.print(_steps(report))
    for name, make in (("bandwidth", _bandwidth), ("decode", _decode), ("resident", _resident), ("prefill", _prefill)):
        if parts.get(name):
            console.print(make(parts[name]))
    if report["simulated"]:
        console.print(WARNING, markup=False)


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", box=None, pad_edge=False, padding=(0, 2, 0, 0),
                  header_style="bold")
    for number, column in enumerate(columns):
        table.add_column(column, justify="right" if number else "left", no_wrap=bool(number))
    return table


def _of(value: float | None, shape: str = ".2f", by: float = 1.0) -> str:
    return "-" if value is None else format(value / by, shape)


def _steps(report: Mapping[str, Any]) -> Table:
    table = _table("Steps", "step", "state", "what")
    table.columns[2].justify = "left"
    table.columns[2].no_wrap = False
    for name, step in report["steps"].items():
        what = step["error"].splitlines()[0] if step["error"] else _what(name, step["parts"])
        table.add_row(name, step["state"], what)
    return table


def _what(name: str, parts: Mapping[str, Any]) -> str:
    if name == "device":
        device = parts["device"]
        return f"{device['memory_bytes'] / GIB:.0f} GiB, driver for CUDA {device['driver']}, PyCUDA {device['pycuda']}"
    if name == "numerics":
        return f"{parts['checked']} pairs of types and head sizes give numpy's values"
    if name == "contract":
        return f"{len(parts['scenes'])} scenes"
    if name == "bitwise":
        counts = parts["counts"]
        return (f"{counts['streamed_rows']:,} rows with {counts['pages']:,} pages streamed equal to resident ones, bit "
                f"for bit: {counts['pairs']} pairs of types, {counts['shapes']} shapes, {counts['pools']} pools, "
                f"{counts['runs']} runs; at most {max(parts['float64'].values()):.1e} off float64"
                + (f"; no time for {len(parts['not_reached'])} more" if parts.get("not_reached") else ""))
    return ""


def _bandwidth(parts: Mapping[str, Any]) -> Table:
    table = _table("Pinned copies, GB/s (a call's host time, µs)", "size", "to the device", "", "to the host", "")
    for size, into in parts.get("h2d", {}).items():
        back = parts.get("d2h", {}).get(size, {})
        table.add_row(_size(int(size)), _of(into["bytes_per_s"], ".1f", 1e9), _of(into["host_us_per_call"], ".1f"),
                      _of(back.get("bytes_per_s"), ".1f", 1e9), _of(back.get("host_us_per_call"), ".1f"))
    if "both" in parts:
        table.add_row("both ways at once", _of(parts["both"]["bytes_per_s"], ".1f", 1e9), "", "", "")
    return table


def _size(size: int) -> str:
    return f"{size // GIB} GiB" if size >= GIB else f"{size // MIB} MiB" if size >= MIB else f"{size // 1024} KiB"


def _decode(parts: Mapping[str, Any]) -> Table:
    table = _table("Decode, KV only: append and attention of all layers, no weights", "KV / share resident", "pool MiB",
                   "MiB/token", "calls", "ms/token", "tokens/s", "copy busy", "of the link", "host ms")
    for name, point in parts.items():
        table.add_row(name, f"{point['pool_bytes'] / MIB:,.1f}", f"{point['h2d_bytes_per_token'] / MIB:,.1f}",
                      f"{point['h2d_calls_per_token']:,.0f}", _of(point["ms_per_token"]),
                      _of(point["tokens_per_s"], ".1f"), _of(point["copy_busy_share"]), _of(point["link_share"]),
                      _of(point["host_ms_per_step"]))
    return table


def _resident(parts: Mapping[str, Any]) -> Table:
    table = _table("Decode, all resident: a pool just large enough, one twice as large, and the launches alone", "pool",
                   "ms/token", "host ms", "launches", "just enough is x times")
    ratios = parts.get("ratios", {})
    for name in ("enough", "plenty", "bare"):
        if name in parts:
            point = parts[name]
            table.add_row(name, _of(point["ms_per_token"], ".3f"), _of(point.get("host_ms_per_step"), ".3f"),
                          f"{point['launches_per_token']:,.0f}", _of(ratios.get(f"enough_to_{name}"), ".3f"))
    return table


def _prefill(parts: Mapping[str, Any]) -> Table:
    table = _table("Prefill, KV only", "KV / share resident", "rows", "MiB/step", "launches", "ms/step", "tokens/s",
                   "host ms")
    for name, point in parts.items():
        table.add_row(name, str(point["rows"]), f"{point['h2d_bytes_per_step'] / MIB:,.1f}",
                      f"{point['launches_per_step']:,.0f}", _of(point["ms_per_step"]),
                      _of(point["tokens_per_s"], ",.0f"), _of(point["host_ms_per_step"]))
    return table
