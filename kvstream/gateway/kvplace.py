"""Which directory a store uses."""

from __future__ import annotations

from hashlib import blake2b
from pathlib import Path

from ..adapters.slot_calls import Identity
from .inject_settings import InjectSettings
from .kvfolders import Known, remembering
from .kvstore import KvStore
from .saving import StoreMeter
from .slot_ports import SlotsFound
from .statedir import default_state_dir


def _root(settings: InjectSettings) -> Path:
    return Path(settings.state_dir).expanduser() if settings.state_dir else default_state_dir()


def remote_state_dir(settings: InjectSettings, base_url: str) -> Path:
    """Where manifests of files lie that only the runtime at ``base_url`` sees. The address names it, in digits only."""
    return _root(settings) / "remote" / blake2b(base_url.encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()


def open_store(found: SlotsFound, settings: InjectSettings, base_url: str, *, page_tokens: int,
               meter: StoreMeter | None = None) -> KvStore:
    """The store for what the self-check found: in the runtime's own directory where a file that it wrote was seen
    there, else by names in rotation. Nothing is touched before ``load``, which also notes the folder for ``kvstream
    cache``."""
    folder = Path(found.slots_dir_hint) if found.slots_dir_hint else None
    remote = remote_state_dir(settings, base_url)
    used = Known((folder or remote).absolute(), base_url, settings.disk_bytes_max, folder is None, 0.0)
    return KvStore(folder, remote, found.identity or Identity(""), settings, page_tokens=page_tokens, meter=meter,
                   opened=remembering(_root(settings), used))
