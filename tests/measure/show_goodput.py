"""Sixty-four clients on four slots, short and long requests: who is served in time, directly and through KVStream?

    python tests/measure/show_goodput.py [--seconds 60] [--rounds 1] [--clients 64] [--slo BOUNDS] [--json FILE]

One real llama.cpp server; in front of it one KVStream that serves first come first (its default) and one that serves
the least work first. One run of `kvstream bench` measures all three: they take turns, ``--seconds`` in each round. The
page is the bench's own; beneath it stand the bars.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from figures import Page
from processes import environment, kvstream, llama, workplace

SLOTS, CONTEXT = 4, 2048
MIX = "short:0.8:48:16,long:0.2:500:32"
SLO = "ttft:20s,tpot:500ms"
LABELS = ("direct", "kvstream fcfs", "kvstream sjf")
SJF = {"KVSTREAM_SCHEDULER__PRIORITY": "sjf"}


def bench(urls: list[str], args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """The bench as a user types it. Its page goes to our stdout."""
    file = folder / "bench.json"
    command = [sys.executable, "-m", "kvstream", "bench", "--url", urls[0], "--label", LABELS[0]]
    for url, label in zip(urls[1:], LABELS[1:], strict=True):
        command += ["--compare", url, "--compare-label", label]
    command += ["--concurrency", str(args.clients), "--duration", str(args.seconds * args.rounds), "--rounds",
                str(args.rounds), "--mix", args.mix, "--slo", args.slo, "--timeout", str(args.timeout), "--warmup", "2",
                "--json", str(file)]
    if args.plot is not None:
        command += ["--plot", str(args.plot.resolve())]
    print("kvstream bench " + " ".join(command[4:]), flush=True)
    done = subprocess.run(command, env=environment(), cwd=folder, check=False)
    if not file.exists():
        raise SystemExit(f"the bench ended with {done.returncode} and no figures")
    value: dict[str, Any] = json.loads(file.read_text("utf-8"))
    return value


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Goodput under overload.")
    parser.add_argument("--seconds", type=float, default=60.0, help="of each target in each round")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--mix", default=MIX)
    parser.add_argument("--slo", default=SLO)
    parser.add_argument("--timeout", type=float, default=150.0)
    parser.add_argument("--plot", type=Path, metavar="FILE.png")
    parser.add_argument("--json", type=Path, metavar="FILE")
    return parser.parse_args()


def main() -> int:
    args = arguments()
    page = Page("goodput")
    with workplace() as folder, llama(folder, "-np", str(SLOTS), "-c", str(SLOTS * CONTEXT), "-b", "512") as runtime:
        (folder / "sjf").mkdir()
        with kvstream(folder, runtime, "llamacpp") as fcfs, \
                kvstream(folder / "sjf", runtime, "llamacpp", env=SJF) as sjf:
            value = bench([runtime.url, fcfs.url, sjf.url], args, folder)
    page.data["bench"] = value
    whole = {target["label"]: target["whole"] for target in value["targets"]}
    met = {label: group["goodput"]["per_s"] for label, group in whole.items()}
    direct, first, least = (met[label] for label in LABELS)
    page.bar("goodput through KVStream, fcfs, is not below that of direct", f"{first:.2f}/s against {direct:.2f}/s",
             first >= direct)
    page.bar("goodput through KVStream, sjf, is the highest", f"{least:.2f}/s against {direct:.2f}/s and {first:.2f}/s",
             least > max(direct, first))
    failed = {label: group["errors"] + group["timeouts"] + group["refused"] for label, group in whole.items()}
    page.bar("no request through KVStream fails", f"{failed[LABELS[1]]} and {failed[LABELS[2]]}, direct "
             f"{failed[LABELS[0]]}", not failed[LABELS[1]] and not failed[LABELS[2]])
    return page.close(args.json)


if __name__ == "__main__":
    sys.exit(main())
