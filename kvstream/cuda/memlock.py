"""How much memory this process may lock, beside how much of it is about to be pinned.

CUDA pins through its driver, which mostly asks no limit; where one counts, the error says nothing of it. So a limit
that is too low is told beforehand. In containers it is small without anybody having said so, also under a unit with
LimitMEMLOCK=infinity: the container's hard limit wins.
"""

from __future__ import annotations

import sys


def limit_bytes() -> int | None:
    """What may be locked in all; None when there is no limit, or none to be known."""
    if sys.platform == "win32":
        return None
    import resource

    soft = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    return None if soft == resource.RLIM_INFINITY else soft


def too_low(wanted: int, limit: int | None) -> str:
    """The warning for ``wanted`` bytes of pinned memory; empty where they fit."""
    if limit is None or wanted <= limit:
        return ""
    return (f"{wanted} bytes of host memory are to be pinned, and this process may lock {limit} (RLIMIT_MEMLOCK); if "
            f"that fails: `ulimit -l {-(-wanted // 1024)}` or unlimited in a shell, LimitMEMLOCK=infinity in a unit, "
            "`--ulimit memlock=-1` for a container")
