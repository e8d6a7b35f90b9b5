"""Hard inject on a real llama.cpp server, each beside direct: all six measurements, or those that are named.

    python tests/measure/show_inject.py [NAME ...] [--quick] [--out FOLDER] [-- OPTIONS OF THE SCRIPT]

Names: fanout restart turns preempt noop mixed. Each is a script of its own (``show_inject_NAME.py``) with options of
its own; here each gets ``--json`` and ``--plot`` in FOLDER. About 25 minutes for all on two quiet cores.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

from figures import Page
from processes import HERE, environment

NAMES = ("fanout", "restart", "turns", "preempt", "noop", "mixed")


def main() -> int:
    cut = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    parser = argparse.ArgumentParser(description=f"Measurements of hard inject: {' '.join(NAMES)}.")
    parser.add_argument("names", nargs="*", choices=[*NAMES, []], metavar="NAME")
    parser.add_argument("--quick", action="store_true", help="small sizes: to see that it runs, not for figures")
    parser.add_argument("--out", type=Path, default=Path("bench-inject"), help="folder of the JSON and PNG files")
    args = parser.parse_args(sys.argv[1:cut])
    args.out.mkdir(parents=True, exist_ok=True)
    page, names = Page("hard inject"), args.names or list(NAMES)
    for number, name in enumerate(names, 1):
        print(f"\n=== {name} ({number} of {len(names)}) ===", flush=True)
        file = args.out / f"{name}.json"
        file.unlink(missing_ok=True)
        command = [sys.executable, str(HERE / f"show_inject_{name}.py"), "--json", str(file), "--plot",
                   str(args.out / f"{name}.png"), *(["--quick"] if args.quick else []), *sys.argv[cut + 1 :]]
        done = subprocess.run(command, env=environment(), check=False)
        if not file.exists():
            page.bar(f"{name}: ran to its end", f"exit code {done.returncode}", False)
            continue
        for bar in json.loads(file.read_text("utf-8"))["bars"]:
            page.bar(f"{name}: {bar['text']}", bar["value"], bar["met"])
    return page.close(args.out / "all.json")


if __name__ == "__main__":
    sys.exit(main())
