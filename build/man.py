"""``just man``: writes dist/kvstream.1, which is what ``kvstream man`` prints.

    python build/man.py [FILE]
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def main() -> None:
    sys.path.insert(0, str(ROOT))
    from kvstream import __version__, cli, cli_man

    into = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "dist" / "kvstream.1"
    into.parent.mkdir(parents=True, exist_ok=True)
    into.write_text(cli_man.page(cli.main, __version__), "utf-8")
    print(into)


if __name__ == "__main__":
    main()
