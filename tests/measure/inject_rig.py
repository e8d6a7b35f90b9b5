"""What the measurements of hard inject share: servers side by side, one client, and the server's own counters."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import trio
from attrs import define, field, frozen
from figures import Page
from inject_sums import Turn, samples, total
from processes import THREADS, Child, kvstream, model_path, running, workplace

from kvstream.gateway.embedded_find import FoundServer, child_argv, child_environment, free_port

WORDS_TEXT = ("alpha beta gamma delta epsilon river mountain cloud engine paper silver window garden market signal "
              "forest harbor lantern meadow orbit")
WORDS = WORDS_TEXT.split()
ANSWER_S_MAX = 600.0


# --- processes --------------------------------------------------------------------------------------------------------


def llama_bare(folder: Path, *flags: str, model: Path | None = None, threads: str = THREADS,
               ) -> contextlib.AbstractContextManager[Child]:
    """llama.cpp's server as `llama-server -m FILE` starts it, with all its defaults but these: threads, and metrics.
    ``flags`` are its own; its log is in ``folder``. Without ``-np`` among them there are four slots of a unified pool:
    that is the default of `llama-server`, while the wheel's own would be one slot."""
    folder.mkdir(parents=True, exist_ok=True)
    port = free_port()
    fixed = ["-m", str(model or model_path()), "-np", "-1", "-t", threads, "-tb", threads, "--metrics",
             "--host", "127.0.0.1", "--port", str(port)]
    server = FoundServer("xllamacpp")
    return running("llama", child_argv(server, [*fixed, *flags], parent=os.getpid()), port, "/health", folder,
                   env=child_environment(server))


def llama_hard(folder: Path, slots: int, context: int, *flags: str, model: Path | None = None, threads: str = THREADS,
               ) -> contextlib.AbstractContextManager[Child]:
    """The same with what KVStream recommends for hard inject. Slot files are in ``folder/slots``."""
    files = folder / "slots"
    files.mkdir(parents=True, exist_ok=True)
    return llama_bare(folder, "-np", str(slots), "-c", str(slots * context), "--cache-ram", "0", "--slot-save-path",
                      f"{files}{os.sep}", *flags, model=model, threads=threads)


@frozen
class Arm:
    """One way to the model: where clients connect, and the server whose counters count. ``gateway`` is the KVStream
    between, if there is one."""

    name: str
    runtime: Child
    gateway: Child | None = None

    @property
    def url(self) -> str:
        return self.runtime.url if self.gateway is None else self.gateway.url


@contextlib.contextmanager
def kvstream_arm(folder: Path, runtime: Child, name: str = "kvstream", *, await_hard: bool = True,
                 **env: str) -> Iterator[Arm]:
    """A KVStream in front of ``runtime``; returns when its self-check is done, with a word if it found no hard mode."""
    folder.mkdir(parents=True, exist_ok=True)
    with kvstream(folder, runtime, "llamacpp", env=env) as gateway:
        arm = Arm(name, runtime, gateway)
        if await_hard:
            mode = _await_mode(gateway)
            if mode != "hard":
                print(f"{name}: the self-check says {mode!r}, not 'hard'", flush=True)
        yield arm


def _await_mode(gateway: Child) -> str:
    deadline, mode = time.monotonic() + 15, "?"
    while time.monotonic() < deadline:
        mode = mode_of(gateway.json("/status"))
        if mode in ("hard", "hard-unpinned"):
            break
        time.sleep(0.1)
    return mode


def mode_of(status: Any) -> str:
    """How a lane uses its slots, wherever in ``/status`` it says so."""
    if isinstance(status, dict):
        for key, value in status.items():
            if key in ("inject", "hard_inject") and isinstance(value, dict) and "mode" in value:
                return str(value["mode"])
        for value in status.values():
            if (found := mode_of(value)) != "?":
                return found
    if isinstance(status, list):
        for value in status:
            if (found := mode_of(value)) != "?":
                return found
    return "?"


# --- what a server counted --------------------------------------------------------------------------------------------


@frozen
class Counted:
    """llama.cpp's own counters: tokens of prompts that it computed and found in its cache, tokens it answered."""

    computed: float
    cached: float
    answered: float

    def since(self, before: Counted) -> Counted:
        return Counted(self.computed - before.computed, self.cached - before.cached, self.answered - before.answered)


async def counted(runtime: Child) -> Counted:
    page = samples((await get(runtime.url, "/metrics")).text)
    return Counted(*(total(page, f"llamacpp:{name}_total")
                     for name in ("prompt_tokens", "prompt_tokens_cached", "tokens_predicted")))


async def get(url: str, path: str) -> httpx.Response:
    async with client(30) as http:
        response = await http.get(url + path)
    return response.raise_for_status()


async def post(url: str, path: str, body: Any) -> Any:
    async with client(ANSWER_S_MAX) as http:
        response = await http.post(url + path, json=body)
    return response.raise_for_status().json()


def client(timeout_s: float) -> httpx.AsyncClient:
    """llama.cpp closes the connection after a stream without a word: every call has a connection of its own."""
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
    return httpx.AsyncClient(trust_env=False, timeout=timeout_s, limits=limits)


async def prompt_ids(runtime: Child, messages: Sequence[Any]) -> list[int]:
    """The tokens of a chat's prompt as the server makes them. Costs it no prefill."""
    text = (await post(runtime.url, "/apply-template", {"messages": messages}))["prompt"]
    body = {"content": text, "add_special": True, "parse_special": True}
    return [int(token) for token in (await post(runtime.url, "/tokenize", body))["tokens"]]


async def quiet(arm: Arm, within_s: float = 60.0, calm_s: float = 0.6) -> None:
    """Wait until no slot works, and KVStream has had a moment to save what it wants to save at leisure."""
    with trio.fail_after(within_s):
        calm = 0.0
        while calm < calm_s:
            busy = any(slot["is_processing"] for slot in (await get(arm.runtime.url, "/slots")).json())
            calm = 0.0 if busy else calm + 0.2
            await trio.sleep(0.2)


# --- the client -------------------------------------------------------------------------------------------------------


@define
class Heard:
    """One streamed answer. Times are Trio's; ``first`` is that of the first text."""

    sent: float = 0.0
    first: float | None = None
    ended: float | None = None
    pieces: list[str] = field(factory=list)
    finish: str | None = None
    usage: dict[str, Any] = field(factory=dict)
    error: str | None = None

    @property
    def ttft_s(self) -> float:
        """Infinite when no text came."""
        return float("inf") if self.first is None else self.first - self.sent

    @property
    def text(self) -> str:
        return "".join(self.pieces)

    @property
    def served(self) -> bool:
        return self.error is None and self.finish is not None

    @property
    def turn(self) -> Turn:
        cached = (self.usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        return Turn(self.usage.get("prompt_tokens", 0), cached, self.usage.get("completion_tokens", 0))

    def take(self, line: str) -> None:
        if not line.startswith("data: {"):
            return
        event = json.loads(line[6:])
        if "error" in event:
            self.error = str(event["error"].get("message"))
        self.usage = event.get("usage") or self.usage
        for choice in event.get("choices") or ():
            if text := (choice.get("delta") or {}).get("content"):
                self.first = trio.current_time() if self.first is None else self.first
                self.pieces.append(text)
            self.finish = choice.get("finish_reason") or self.finish


async def chat(url: str, messages: Sequence[Any], tokens: int, heard: Heard | None = None, *, priority: str = "",
               **more: Any) -> Heard:
    """One greedy streamed chat of so many tokens; what the server does is no exception. ``heard`` fills while it goes
    on. An end token is not taken for an end, else some answers have no text at all, and no time to it."""
    heard = heard or Heard()
    body = {"model": "default", "messages": messages, "max_tokens": tokens, "temperature": 0, "stream": True,
            "stream_options": {"include_usage": True}, "ignore_eos": True, **more}
    headers = {"x-kvstream-priority": priority} if priority else {}
    heard.sent = trio.current_time()
    try:
        async with client(ANSWER_S_MAX) as http, http.stream(
                "POST", url + "/v1/chat/completions", json=body, headers=headers) as response:
            if response.status_code != 200:
                heard.error = f"{response.status_code} {(await response.aread())[:200]!r}"
            async for line in response.aiter_lines():
                heard.take(line)
    except httpx.HTTPError as error:
        heard.error = heard.error or repr(error)
    heard.ended = trio.current_time()
    return heard


def words(rng: random.Random, count: int) -> str:
    return " ".join(rng.choice(WORDS) for _ in range(count))


def system_and_user(system: str, user: str) -> list[dict[str, str]]:
    return [{"role": "system", "content": system}, {"role": "user", "content": user}]


# --- the script -------------------------------------------------------------------------------------------------------


def parser(text: str, *, rounds: int) -> argparse.ArgumentParser:
    """The options that all of them have."""
    made = argparse.ArgumentParser(description=text)
    made.add_argument("--rounds", type=int, default=rounds)
    made.add_argument("--seed", type=int, default=None, help="of the first round; another each time if left out")
    made.add_argument("--threads", default=THREADS, help="of each llama.cpp server")
    made.add_argument("--quick", action="store_true", help="small sizes: to see that it runs, not for figures")
    made.add_argument("--json", type=Path, metavar="FILE")
    made.add_argument("--plot", type=Path, metavar="FILE.png")
    return made


def seeds(args: argparse.Namespace) -> list[int]:
    first = args.seed if args.seed is not None else random.SystemRandom().randrange(10**9)
    return [first + i for i in range(args.rounds)]


def tell(text: str) -> None:
    """Progress, on stderr so that the page stays a page."""
    print(text, file=sys.stderr, flush=True)


def median(values: Sequence[float]) -> float:
    return statistics.median(values) if values else float("nan")


def plot(file: Path | None, title: str, draw: Callable[[Any], None], width: float = 8.0) -> None:
    """One pair of axes into a PNG file. matplotlib is only needed here."""
    if file is None:
        return
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, 4.5), layout="constrained")
    axes = figure.subplots()
    axes.set_title(title)
    draw(axes)
    figure.savefig(file, dpi=120)
    tell(f"wrote {file}")


__all__ = ["Arm", "Counted", "Heard", "Page", "chat", "counted", "get", "kvstream_arm", "llama_bare", "llama_hard",
           "median", "mode_of", "parser", "plot", "post", "prompt_ids", "quiet", "seeds", "system_and_user", "tell",
           "words", "workplace"]
