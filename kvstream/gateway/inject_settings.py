"""What hard inject is told."""

from __future__ import annotations

from attrs import frozen


@frozen
class InjectSettings:
    """See ``[inject]`` in ``kvstream.toml``. None of it applies where the self-check finds that it cannot work.

    ``dir``: the server's ``--slot-save-path`` as seen from here, empty to find out. ``state_dir``: where manifests of
    files are kept that a remote server has. ``disk_bytes_max`` bounds the files, ``files_max`` their number where we
    cannot delete them. A save that takes longer than ``slow_save_s`` switches saving off. ``misses_max`` restores
    without effect switch everything off. ``drain_save_s`` bounds what is saved when KVStream stops, ``check_s_max`` the
    self-check, ``call_s_max`` one slot call.
    """

    dir: str = ""
    state_dir: str = ""
    disk_bytes_max: int = 8 * 2**30
    files_max: int = 32
    slow_save_s: float = 3.0
    misses_max: int = 3
    drain_save_s: float = 5.0
    check_s_max: float = 5.0
    call_s_max: float = 120.0
