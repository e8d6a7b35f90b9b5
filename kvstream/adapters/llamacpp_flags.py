"""The flags a llama.cpp server was really started with, from its command line and environment. Pure.

``/props`` tells neither ``--cache-ram`` nor ``--slot-save-path``, ``-b`` nor whether ``-np`` was given.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Final

from attrs import frozen

# What llama-server does when a flag is not given (b11434).
CACHE_RAM_DEFAULT_MIB: Final = 8192
BATCH_DEFAULT: Final = 2048
PORT_DEFAULT: Final = 8080

_NAMES: Final[Mapping[str, str]] = MappingProxyType({
    "-np": "parallel", "--parallel": "parallel", "-c": "context", "--ctx-size": "context", "-b": "batch",
    "--batch-size": "batch", "--cache-ram": "cache_ram", "-cram": "cache_ram", "--slot-save-path": "slot_save_path",
    "--port": "port", "--host": "host", "--mmproj": "mmproj", "-mm": "mmproj", "-m": "model", "--model": "model",
    "--sleep-idle-seconds": "sleep", "--models-max": "models_max",
})  # fmt: skip
_SWITCHES: Final[Mapping[str, tuple[str, bool]]] = MappingProxyType({
    "--metrics": ("metrics", True), "--slots": ("slots", True), "--no-slots": ("slots", False),
    "--kv-unified": ("unified", True), "-kvu": ("unified", True), "--no-kv-unified": ("unified", False),
    "-no-kvu": ("unified", False), "--no-cache-idle-slots": ("cache_idle_slots", False),
})  # fmt: skip
_ENVIRONMENT: Final[Mapping[str, str]] = MappingProxyType({
    "LLAMA_ARG_N_PARALLEL": "parallel", "LLAMA_ARG_CTX_SIZE": "context", "LLAMA_ARG_BATCH": "batch",
    "LLAMA_ARG_CACHE_RAM": "cache_ram", "LLAMA_ARG_PORT": "port", "LLAMA_ARG_MODEL": "model",
})  # fmt: skip
_FALSE: Final = frozenset(("0", "false", "off", "no"))
ENVIRONMENT_PREFIX: Final = "LLAMA_ARG_"


@frozen
class ServerFlags:
    """What was given, and None where nothing was: then llama.cpp's default counts, see the properties."""

    port: int = PORT_DEFAULT
    parallel: int | None = None
    batch: int | None = None
    cache_ram_given: int | None = None
    slot_save_path: str = ""
    mmproj: str = ""
    metrics: bool = False
    unified_given: bool | None = None
    cache_idle_slots: bool = True

    @property
    def cache_ram_mib(self) -> int:
        """0: off; -1: without a limit."""
        return CACHE_RAM_DEFAULT_MIB if self.cache_ram_given is None else self.cache_ram_given

    @property
    def batch_tokens(self) -> int:
        return BATCH_DEFAULT if self.batch is None else self.batch

    @property
    def unified(self) -> bool:
        """One KV pool for all slots: asked for, or for want of an explicit number of slots."""
        return self.parallel is None if self.unified_given is None else self.unified_given

    @classmethod
    def read(cls, argv: Sequence[str], environment: Mapping[str, str]) -> ServerFlags:
        """The last of equal flags counts, and a flag before the environment, as in llama.cpp."""
        given: dict[str, str] = {_ENVIRONMENT[n]: v for n, v in environment.items() if n in _ENVIRONMENT}
        switches: dict[str, bool] = {}
        for variable, name in (("LLAMA_ARG_ENDPOINT_METRICS", "metrics"), ("LLAMA_ARG_KV_UNIFIED", "unified")):
            if variable in environment:
                switches[name] = environment[variable].lower() not in _FALSE
        for index, word in enumerate(argv):
            if word in _NAMES and index + 1 < len(argv):
                given[_NAMES[word]] = argv[index + 1]
            elif word in _SWITCHES:
                name, value = _SWITCHES[word]
                switches[name] = value
        parallel = _number(given.get("parallel"))
        return cls(
            port=_number(given.get("port")) or PORT_DEFAULT,
            parallel=None if parallel is None or parallel < 1 else parallel,  # -1: let it choose, as if not given
            batch=_number(given.get("batch")), cache_ram_given=_number(given.get("cache_ram")),
            slot_save_path=given.get("slot_save_path", ""), mmproj=given.get("mmproj", ""),
            metrics=switches.get("metrics", False), unified_given=switches.get("unified"),
            cache_idle_slots=switches.get("cache_idle_slots", True))  # fmt: skip


def is_llama_server(argv: Sequence[str]) -> bool:
    """Whether a command line starts a llama.cpp server, or KVStream's embedded one."""
    program = argv[0].replace("\\", "/").rpartition("/")[2].lower() if argv else ""
    if program.removesuffix(".exe") == "llama-server":
        return True
    return "_llama-child" in argv[:3] or any(word.endswith("embedded_child") for word in argv[:5])


def _number(text: str | None) -> int | None:
    try:
        return None if text is None else int(text)
    except ValueError:
        return None
