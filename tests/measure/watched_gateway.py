"""``kvstream serve`` that tells how many Trio tasks it has: a line on stdin is answered with a JSON line on stdout.

    python watched_gateway.py FLAGS...        the flags of `kvstream serve`

Same configuration, same run loop; on top of it one thread that waits for stdin. Descriptors and memory can be seen from
outside a process, tasks cannot.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import threading

import trio

from kvstream.cli import main as command_line
from kvstream.config import Loaded
from kvstream.gateway import serve as gateway


def figures() -> dict[str, int]:
    statistics = trio.lowlevel.current_statistics()
    return {"tasks": statistics.tasks_living, "objects": len(gc.get_objects())}


def answer(token: trio.lowlevel.TrioToken) -> None:
    for _ in sys.stdin:
        try:
            line = json.dumps(trio.from_thread.run_sync(figures, trio_token=token))
        except trio.RunFinishedError:
            return
        print(line, flush=True)
    os._exit(0)  # who started us is gone


async def serve_watched(loaded: Loaded) -> int:
    threading.Thread(target=answer, args=(trio.lowlevel.current_trio_token(),), daemon=True).start()
    return await gateway.serve(loaded)


def run(loaded: Loaded) -> int:
    gateway.set_up_logging(loaded.config.logging.level, loaded.config.logging.format)
    return trio.run(serve_watched, loaded)


if __name__ == "__main__":
    # The command line imports `run` when it serves; everything before that is its own.
    gateway.run = run
    command_line(["serve", *sys.argv[1:]])
