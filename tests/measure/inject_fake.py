"""The fake runtime of the tests as a process, with rates like those of a small model, for what no real server shows.

    python inject_fake.py PORT SLOTS_DIR KNOBS_AS_JSON
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import trio

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

from tests.fakes import open_runtime
from tests.fakes.server import FakeServer


async def main(port: int, slots_dir: str, knobs: dict[str, object]) -> None:
    async with open_runtime(**{"slots_dir": slots_dir, "cell_bytes": 64, **knobs}) as runtime:
        await FakeServer(runtime, port=port).run()


if __name__ == "__main__":
    trio.run(main, int(sys.argv[1]), sys.argv[2], json.loads(sys.argv[3]))
