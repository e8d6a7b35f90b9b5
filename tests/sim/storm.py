"""A whole gateway in a storm: every feature at once, on the virtual clock. See ``test_storm``.

The gateway is the one that ``kvstream serve`` makes (``open_gateway``: keys, coalescing, cache, router, lanes, reload,
drain); only its sockets are replaced, downwards by the fake runtimes in memory, upwards by calls of its ASGI app. One
seed decides the configuration, what the clients do and what befalls the backends.
"""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import attrs
import pytest
import trio
from attrs import define, field

from kvstream.config import BackendConfig, Config, Loaded
from kvstream.core import scheduler as core_scheduler
from kvstream.core.messages import Event
from kvstream.gateway import lanes as lanes_module
from kvstream.gateway import serve as serve_module
from kvstream.gateway.serve import Gateway, open_gateway
from tests.fakes import FakeRuntime, FakeUpstream, Script, open_runtime
from tests.gateway.conftest import CHAT, Call, Lane, config_of, is_idle, text_of

WAIT_S_MAX = 15.0
TOTAL_S_MAX = 25.0
BUSY_S_MAX = 4.0
CALM_S = 120.0  # what breakers, seats and caches may take until all is as before
# counting, the wait and the answer, in one lane and then in another, and a little
BOUND_S = 2 * (WAIT_S_MAX + TOTAL_S_MAX + 5.0) + 5.0
MESSAGES = "/v1/messages"
COMPLETIONS = "/v1/completions"
KEYS = ("alice", "bob", "carol")
BROKEN = ("cut", "rst", "error_event", "eof_no_finish")


@define(eq=False)
class Told:
    """What a runtime wrote for one call: by prompt, the bytes."""

    prompt: str
    path: str
    data: bytes = b""


@define(eq=False)
class World:
    """What one seed decides, and what came of it."""

    rng: random.Random
    gateway: Gateway
    runtimes: dict[str, FakeRuntime]
    upstreams: list[StormUpstream]
    surface: Lane
    config: Config  # as it was last written
    keys_file: Path
    valid: dict[str, float] = field(factory=dict)  # keys, and since when
    revoked: dict[str, float] = field(factory=dict)
    outcomes: Counter[str] = field(factory=Counter)
    asked: Counter[str] = field(factory=Counter)  # by prompt: how many calls
    calls: int = 0
    model_calls: int = 0
    number: int = 0
    ended: bool = False
    drained: float = float("inf")  # since when it drains
    spread_s: float = 40.0  # clients come within so many seconds

    def word(self) -> str:
        self.number += 1
        return f"unique{self.number}"

    @property
    def told(self) -> list[Told]:
        return [told for upstream in self.upstreams for told in upstream.told]

    def began(self, prompt: str) -> int:
        """How often a runtime began to compute an answer to this."""
        return sum(entry.slot is not None for runtime in self.runtimes.values()
                   for entry in runtime.journal.calls if entry.prompt == prompt)

    def finished(self, prompt: str) -> int:
        return sum(entry.outcome == "done" and entry.slot is not None for runtime in self.runtimes.values()
                   for entry in runtime.journal.calls if entry.prompt == prompt)


class StormUpstream(FakeUpstream):
    """Keeps what a runtime wrote, for comparison with what clients read."""

    def __init__(self, runtime: FakeRuntime) -> None:
        super().__init__(runtime)
        self.told: list[Told] = []

    @asynccontextmanager
    async def open(self, call: Any, content: Any = None) -> AsyncIterator[Any]:
        async with super().open(call, content) as response:
            if call.method == "POST" and response.status == 200:
                told = Told(_prompt(call.body), call.path)
                self.told.append(told)
                receive = response.receive

                async def kept() -> bytes:
                    data = await receive()
                    told.data += data
                    return bytes(data)

                response.receive = kept  # type: ignore[method-assign]
            yield response


def _prompt(body: bytes) -> str:
    view = json.loads(body or b"null")
    if not isinstance(view, dict):
        return ""
    messages = view.get("messages")
    return str(messages[-1]["content"] if messages else view.get("prompt", ""))


class NoServer:
    """In the place of the listener."""

    ports = (1,)

    async def run(self, *, task_status: Any = trio.TASK_STATUS_IGNORED) -> None:
        task_status.started()
        await trio.sleep_forever()

    async def stop_listening(self) -> None:
        await trio.lowlevel.checkpoint()


# --- what is served ---------------------------------------------------------------------------------------------------


def backends_of(rng: random.Random) -> tuple[list[BackendConfig], dict[str, dict[str, Any]]]:
    """(the backends, the knobs of their fakes by address)."""
    both = {"slots": rng.choice((1, 2, 4)), "decode_rate": 50.0, "prefill_rate": 1000.0, "n_batch": 128,
            "answer_tokens": rng.choice((10, 40, None)), "busy_after_close": rng.choice((0.0, 0.0, 1.0))}
    unified = rng.random() < 0.4
    rows = [BackendConfig(name="a", base_url="http://a", aliases=("shared=fake-model", "gpt=fake-model"))]
    knobs: dict[str, dict[str, Any]] = {"http://a": both | {"n_ctx": 2048 if unified else 8192, "unified": unified}}
    kind = rng.choice(("llamacpp", "openai"))
    rows.append(BackendConfig(type=kind, name="b", base_url="http://b", aliases=("shared=other", "only-b=other")))
    knobs["http://b"] = both | {"dialect": kind, "model": "other", "slots": 2, "n_ctx": 4096, "gpu_blocks": 300,
                                "deaf": rng.choice(("nonstream", "none"))}
    if rng.random() < 0.6:
        rows.append(BackendConfig(type="ollama", name="o", base_url="http://o", seats=rng.choice((1, 3)),
                                  group_by_load_key=rng.random() < 0.5))
        knobs["http://o"] = {"dialect": "ollama", "slots": 3, "model": "olla:latest", "cold_load_s": 1.0,
                             "models": ("ollb:latest",), "decode_rate": 50.0, "prefill_rate": 1000.0}
    return rows, knobs


def config_of_seed(rng: random.Random, rows: list[BackendConfig], keys_file: Path) -> Config:
    return attrs.evolve(config_of(
        server={"keepalive_s": rng.choice((0.5, 3.0)), "stall_s": 3.0, "drain_s": 10.0, "stream_buffer_bytes": 4096,
                "drain_queued": rng.choice(("refuse", "finish"))},
        auth={"keys_file": str(keys_file)},
        upstream={"first_event_s": 15.0, "stall_s": 6.0, "total_s": TOTAL_S_MAX, "load_timeout_s": 8.0,
                  "wedged_s": 4.0, "down_grace_s": rng.choice((0.0, 5.0)), "busy_retry_s_max": BUSY_S_MAX,
                  "slot_idle_s_max": 10.0, "slot_idle_poll_s": 0.05, "health_interval_s": 0.5,
                  "breaker_faults": rng.choice((0, 2, 5)), "breaker_open_s": rng.choice((0.5, 3.0)),
                  "non_stream": rng.choice(("assemble", "assemble", "pass"))},
        scheduler={"max_wait_s": WAIT_S_MAX, "max_queue": rng.choice((4, 100)), "ageing_s": 5.0,
                   "priority": rng.choice(("fcfs", "sjf")), "answer_tokens_default": 32,
                   "max_batch_size": rng.choice((1, 4, 16)), "client_seats_max": rng.choice((0, 0, 1, 2)),
                   "long_prefill_tokens": 150, "leader_tokens": 64, "exclusive_models": rng.random() < 0.4,
                   "switch_wait_s": 2.0, "cold_after_s": 5.0},
        response_cache={"enabled": rng.random() < 0.5, "ttl_s": 20.0},
        coalesce={"enabled": rng.random() < 0.8},
        prefix={"normalize": ("dates", "times") if rng.random() < 0.3 else ()},
    ), backend=rows[0], more_backends=tuple(rows[1:]))


def write_keys(path: Path, names: list[str]) -> None:
    rows = {"alice": 'priority = "high"\nshare = 3.0', "bob": "rate = 120", "carol": 'priority = "low"\nshare = 0.5'}
    path.write_text("".join(f'[[key]]\nname = "{name}"\nkey = "{name}-secret"\n{rows[name]}\n' for name in names))


def watch_steps(patch: pytest.MonkeyPatch) -> None:
    """After every step of every lane the books balance, nobody waits past the deadline, and nobody waits for nothing:
    where nothing runs and the doors are open, nobody waits at all."""
    step = core_scheduler.Scheduler.step

    def checked(self: core_scheduler.Scheduler, now: float, events: list[Event]) -> Any:
        actions = step(self, now, events)
        self.check_invariants()
        seen = self.snapshot(now)
        assert seen.seats.used <= max(seen.seats.total, self._admission.seats_bound)
        assert all(waiting.age_s <= WAIT_S_MAX + 0.001 for waiting in seen.waiting), "waiting past the deadline"
        if seen.up and seen.limits is not None and not seen.running and seen.limit != 0:
            assert not seen.waiting, f"waits for {seen.waiting[0].why} while nothing runs"
        for waiting in seen.waiting:
            assert (waiting.why == "backend") == (not seen.up or seen.limits is None), waiting
            assert waiting.why != "narrowed" or seen.limit is not None, "narrowed by nobody"
            assert waiting.why != "seat" or seen.seats.used, "no seat while none is taken"
        return actions

    patch.setattr(core_scheduler.Scheduler, "step", checked)


@asynccontextmanager
async def open_storm(seed: int, patch: pytest.MonkeyPatch, folder: Path) -> AsyncIterator[World]:
    """A gateway that is up, with all its backends."""
    rng = random.Random(seed)
    random.seed(seed)  # the pauses of busy retries
    patch.setattr(trio._core._run, "_ALLOW_DETERMINISTIC_SCHEDULING", True)
    trio._core._run._r.seed(seed)  # whose turn is first
    rows, knobs = backends_of(rng)
    keys_file = folder / f"keys-{seed}.toml"
    write_keys(keys_file, list(KEYS))
    config = config_of_seed(rng, rows, keys_file)
    watch_steps(patch)
    upstreams: list[StormUpstream] = []
    settings = lanes_module.engine_settings
    async with AsyncExitStack() as stack:
        runtimes = {url: await stack.enter_async_context(open_runtime(**more)) for url, more in knobs.items()}

        @asynccontextmanager
        async def upstream_of(base_url: str, **_: Any) -> AsyncIterator[StormUpstream]:
            upstreams.append(StormUpstream(runtimes[base_url]))
            yield upstreams[-1]

        patch.setattr(lanes_module, "HttpUpstream", upstream_of)
        patch.setattr(lanes_module, "engine_settings", lambda c: attrs.evolve(settings(c), raise_bugs=True))
        patch.setattr(serve_module, "open_sockets", lambda *_: [])
        patch.setattr(serve_module, "_make_server", lambda *_: NoServer())
        world: World
        loaded = attrs.evolve(Loaded.of(config), again=lambda: Loaded.of(world.config))
        gateway = await stack.enter_async_context(open_gateway(loaded))
        nursery = await stack.enter_async_context(trio.open_nursery())
        surface = Lane(gateway.app, None, None, None, nursery)  # type: ignore[arg-type]
        world = World(rng, gateway, runtimes, upstreams, surface, config, keys_file, dict.fromkeys(KEYS, 0.0))
        world.spread_s = rng.choice((4.0, 20.0, 40.0))
        while not all(lane.engine.ready and lane.listed.known for lane in gateway.router.lanes):
            await trio.sleep(0.05)
        yield world
        nursery.cancel_scope.cancel()


# --- clients ----------------------------------------------------------------------------------------------------------


async def client(world: World) -> None:
    """Come at some time and ask; come back when turned away for now."""
    rng = world.rng
    await trio.sleep(rng.uniform(0, world.spread_s))
    for _ in range(3):
        again = await visit(world)
        if again is None:
            return
        await trio.sleep(min(again, 20.0))


def _request(world: World) -> tuple[str, dict[str, Any], str]:
    """(path, body, the last message)."""
    rng = world.rng
    models = ["shared", "shared", "gpt", "only-b", "fake-model", "other", ""]
    if "http://o" in world.runtimes:
        models += ["olla", "ollb", "olla:latest"]
    model = rng.choice(models)
    words = rng.choice((3, 20, 60, 200))
    same = rng.random() < 0.3
    prompt = f"same{rng.randrange(4)} question" if same else world.word() + " " + " ".join(
        f"w{rng.randrange(1000)}" for _ in range(words))
    body: dict[str, Any] = {"stream": rng.random() < 0.6}
    if model:
        body["model"] = model
    if rng.random() < 0.6:
        body["max_tokens"] = rng.choice((1, 8, 40, 100))
    if same or rng.random() < 0.2:
        body["temperature"] = 0
    path = rng.choice((CHAT, CHAT, CHAT, COMPLETIONS, MESSAGES))
    if path == COMPLETIONS:
        return path, body | {"prompt": prompt}, prompt
    if path == MESSAGES:
        body |= {"max_tokens": body.get("max_tokens", 30), "model": model or "gpt"}
    elif rng.random() < 0.1:
        body["n"] = 2
    shared = "All of us begin with these words, which are many, as agents do it. " * rng.choice((0, 0, 4, 12))
    messages = [{"role": "user", "content": shared or "hi"}, {"role": "assistant", "content": "yes"}] if shared else []
    return path, body | {"messages": [*messages, {"role": "user", "content": prompt}]}, prompt


async def visit(world: World) -> float | None:
    """One call, judged. How long to wait before the next; None: no next."""
    rng = world.rng
    path, body, prompt = _request(world)
    key = rng.choice(KEYS)
    priority = rng.choice(("high", "normal", "low"))
    headers = [("Authorization", f"Bearer {key}-secret"), ("x-kvstream-priority", priority)]
    call = Call(stuck=rng.random() < 0.05)
    patience = rng.choice((None, None, None, rng.expovariate(1 / 3), 0.0))
    world.asked[prompt] += 1
    world.calls += 1
    world.model_calls += 1
    began = trio.current_time()
    with trio.move_on_after(BOUND_S) as bound:
        async with trio.open_nursery() as nursery:
            if patience is not None or call.stuck:
                nursery.start_soon(_leave, call, 12.0 if patience is None else patience)
            await world.surface.request("POST", path, body, headers, call=call)
            nursery.cancel_scope.cancel()
    assert not bound.cancelled_caught, f"{path} {body.get('model')} had no end within {BOUND_S:g} s"
    left = call._gone.is_set()
    outcome = "left" if left else judge(world, call, path, body, prompt, key, began)
    world.outcomes[outcome] += 1
    if left and world.asked[prompt] == 1:
        await trio.sleep(1.0)
        held = [e for runtime in world.runtimes.values() for e in runtime.journal.open_now if e.prompt == prompt]
        # another client may have asked the same within that second
        assert not held or world.asked[prompt] > 1, "a client left, and the runtime works on"
    retry = call.headers.get("retry-after")
    return float(retry) if not left and retry is not None and call.status in (429, 503) else None


async def _leave(call: Call, after_s: float) -> None:
    """Also when the test has failed: a client that is stuck ends for nothing else."""
    with trio.CancelScope(shield=True):
        with trio.move_on_after(after_s):
            await call.ended.wait()
        if not call.ended.is_set():
            call.leave()


def judge(world: World, call: Call, path: str, body: dict[str, Any], prompt: str, key: str, began: float) -> str:
    """Whether what the client saw is true. The outcome in a word."""
    now = trio.current_time()
    if call.status == 401:
        assert key in world.revoked and world.revoked[key] <= now, "a valid key was not known"
        return "401"
    assert call.status, "no answer at all"
    if call.status != 200:
        error = json.loads(call.body)
        assert error.get("error"), call.body
        assert "internal error" not in str(error), error
        if call.status in (429, 503):
            wait_s = float(call.headers["retry-after"])
            assert 0 < wait_s, f"Retry-After: {wait_s}: {error}"
        about = error["error"]
        return f"{call.status} {about.get('code') or about['type']}"
    waited = call.headers.get("x-kvstream-queue-ms")
    assert waited is None or 0 <= float(waited) <= 2 * WAIT_S_MAX * 1000 + 1000, waited
    clean = ended_well(call, path, body)
    cached = call.headers.get("x-kvstream-cache") == "hit"
    shared = call.headers.get("x-kvstream-coalesced") == "follower"
    assert began <= world.drained or cached or shared, "served although it came after the end was announced"
    if clean == "whole":
        assert world.finished(prompt), f"a clean end of an answer that no runtime finished: {prompt[:30]}"
    if clean == "broken":
        assert b"error" in call.body, call.body[-300:]
    elif path == CHAT and body["stream"] and clean == "whole" and not _is_ollama(body):
        mine = text_of(call.body)
        theirs = [text_of(told.data) for told in world.told if told.prompt == prompt]
        assert mine in theirs or body.get("n") == 2, f"{mine!r} is none of {theirs!r}"
    if clean != "broken" and body.get("model") == "shared" and path != MESSAGES:
        assert f'"{body["model"]}"'.encode() in call.body, f"the alias was not put back: {call.headers} {call.body!r}"
    return ("cached " if cached else "") + clean


def _is_ollama(body: dict[str, Any]) -> bool:
    return str(body.get("model", "")).startswith("oll")


def ended_well(call: Call, path: str, body: dict[str, Any]) -> str:
    """``whole``, ``cut`` (we ended it at the pool's bound) or ``broken``."""
    if not body["stream"]:
        value = json.loads(call.body)
        reason = value["stop_reason"] if path == MESSAGES else value["choices"][0]["finish_reason"]
        assert reason, value
        cut = reason in ("length", "max_tokens") and ("max_tokens" not in body)
        return "cut" if cut else "whole"
    if path == MESSAGES:
        return "whole" if b"message_stop" in call.body else "broken"
    if b"data: [DONE]" not in call.body:
        return "broken"
    assert b'"finish_reason":"' in call.body.replace(b" ", b""), "an end without a reason"
    cut = b'"finish_reason":"length"' in call.body.replace(b" ", b"") and "max_tokens" not in body
    return "cut" if cut else "whole"


# --- what befalls the gateway -----------------------------------------------------------------------------------------


async def befall(world: World, runtime: FakeRuntime) -> None:
    """Something happens to a runtime now and then, until the storm is over."""
    rng = world.rng
    while not world.ended:
        await trio.sleep(rng.expovariate(1 / 8))
        what = rng.choice(("die", "restart", "wedge", "busy", "break", "break", "hang", "flap", "mute", "load"))
        config = runtime.config
        if what == "die":
            config.refuse = True
            runtime.restart()
            await trio.sleep(rng.choice((0.3, 3.0, 12.0)))
            config.refuse = False
        elif what == "restart":
            runtime.restart(load_s=rng.choice((0.0, 2.0)))
        elif what == "load":
            runtime.restart(load_s=rng.choice((4.0, 12.0)))
        elif what == "wedge":
            runtime.wedge()
            await trio.sleep(rng.choice((2.0, 20.0)))
            if rng.random() < 0.5:
                runtime.restart()
            runtime.wedge(False)
        elif what == "busy":
            headers = (("Retry-After", "1"),) if rng.random() < 0.5 else ()
            runtime.script(Script(status=rng.choice((503, 503, 429, 500)), headers=headers, script=[
                (0, b'{"error": {"message": "server busy, please try again", "type": "server_error"}}')]),
                times=rng.choice((1, 3, 10)))
        elif what == "break":
            runtime.script(Script(end=rng.choice(BROKEN), tokens=rng.choice((0, 1, 5))), times=rng.choice((1, 2, 6)))
        elif what == "hang":
            runtime.script(Script(hang_at_token=rng.choice((0, 3))), times=1)
        elif what == "flap":
            for _ in range(6):
                config.refuse = not config.refuse
                await trio.sleep(rng.uniform(0, 0.8))
            config.refuse = False
        elif what == "mute":
            config.health_hang, config.slots_hang = True, rng.random() < 0.5
            await trio.sleep(rng.choice((1.0, 10.0)))
            config.health_hang = config.slots_hang = False


async def reload(world: World) -> None:
    """The configuration changes now and then."""
    rng = world.rng
    base = world.config
    while not world.ended:
        await trio.sleep(rng.expovariate(1 / 10))
        change_keys(world)
        rows = list(base.backends)
        if rng.random() < 0.3:
            rows[0] = attrs.evolve(rows[0], aliases=("shared=fake-model",))
        if rng.random() < 0.3:
            rows[1] = attrs.evolve(rows[1], seats=rng.choice((1, 2)))
        if rng.random() < 0.3:
            rows.pop(rng.randrange(1, len(rows)))
        cache = attrs.evolve(base.response_cache, enabled=rng.random() < 0.5)
        world.config = attrs.evolve(base, backend=rows[0], more_backends=tuple(rows[1:]), response_cache=cache)
        world.gateway.reloader.ask()
        await trio.sleep(1.0)
        assert world.gateway.reloader.status()["error"] is None
    world.config = base
    write_keys(world.keys_file, list(KEYS))
    world.gateway.reloader.ask()


def change_keys(world: World) -> None:
    names = ["alice", *(name for name in KEYS[1:] if world.rng.random() < 0.8)]
    write_keys(world.keys_file, names)
    for name in KEYS:
        if name not in names:
            world.revoked.setdefault(name, trio.current_time())


async def look(world: World) -> None:
    """The small pages answer at once, whatever happens."""
    while not world.ended:
        await trio.sleep(world.rng.uniform(0.5, 5))
        began = trio.current_time()
        for page in ("/status", "/metrics", "/ready", "/health"):
            answer = await world.surface.get(page)
            assert answer.status == 200 or (page == "/ready" and answer.status == 503), (page, answer.status)
        listing = await world.surface.request("GET", "/v1/models", b"", [("Authorization", "Bearer alice-secret")])
        ids = {row["id"] for row in json.loads(listing.body)["data"]}
        assert "shared" in ids, ids
        assert trio.current_time() - began < 2.0, "a page kept somebody waiting"


async def drain(world: World) -> None:
    """SIGTERM, while all goes on."""
    await trio.sleep(world.rng.uniform(10, 40))
    world.drained = trio.current_time()
    await world.gateway.drain()
    took = trio.current_time() - world.drained
    assert took <= world.config.server.drain_s + serve_module.LAST_FRAMES_S + 0.1, took
    assert not world.gateway.streams or took > world.config.server.drain_s


# --- afterwards -------------------------------------------------------------------------------------------------------


async def _count_down(world: World, scope: trio.CancelScope) -> None:
    """The time for the calm begins when no runtime works any longer for a client that left in the storm: one that it
    cannot hear leaving, and that set no bound to its answer, may hold the only slot until the context is full."""
    unheard = [entry for runtime in world.runtimes.values() for entry in runtime.journal.calls
               if entry.closed_at is not None and entry.ended_at is None]
    while any(entry.ended_at is None for entry in unheard):
        await trio.sleep(0.5)
    scope.deadline = trio.current_time() + CALM_S


async def calm(world: World) -> None:
    """All is well with the backends again: the gateway serves as before, and holds nothing."""
    for runtime in world.runtimes.values():
        runtime.rules.clear()
        if any(job.hang_at is not None for job in (*runtime.engine.running, *runtime.engine.deferred)):
            runtime.restart()  # it hangs for good, for a client that it cannot hear leaving
    models = ["shared", "only-b", "gpt"] + (["olla", "ollb"] if "http://o" in world.runtimes else [])
    settled = False
    async with trio.open_nursery() as nursery:
        nursery.start_soon(_count_down, world, nursery.cancel_scope)
        for model in models:
            headers = [("Authorization", "Bearer alice-secret")]
            body = {"model": model, "messages": [{"role": "user", "content": world.word()}], "max_tokens": 3,
                    "stream": False}
            while True:
                world.model_calls += 1
                answer = await world.surface.post(body, headers=headers)
                if answer.status == 200:
                    break
                await trio.sleep(1.0)
        while not all(is_idle(lane.engine) for lane in world.gateway.lanes.all) or world.gateway.lanes.retiring:
            await trio.sleep(0.5)
        states = {lane.name: lane.engine.guard.circuit.value for lane in world.gateway.lanes.all}
        assert set(states.values()) == {"closed"}, states
        settled = True
        nursery.cancel_scope.cancel()
    if not settled:
        page = json.loads((await world.surface.get("/status")).body)
        raise AssertionError(f"not as before after {CALM_S:g} s: {json.dumps(page)[:3000]}")


def settle_accounts(world: World) -> None:
    """Nothing was run twice, nothing is open, every request was counted once."""
    for prompt, calls in world.asked.items():
        assert world.began(prompt) <= calls, f"{prompt[:30]!r} was run {world.began(prompt)} times for {calls} calls"
    assert not any(upstream.opened for upstream in world.upstreams), "a connection to a runtime is left open"
    assert not world.gateway.app.active
    assert not world.gateway.coalescer._flights, "a flight that nobody reads"
    counted = moved = 0.0
    for metric in world.gateway.router.lanes[0].engine.metrics.registry.collect():
        for sample in metric.samples:
            counted += sample.value if sample.name == "kvstream_requests_total" else 0
            moved += sample.value if sample.name == "kvstream_failovers_total" else 0
    # who left while the prompt was being read or counted may be in no book
    most = world.model_calls + moved
    assert most - world.outcomes["left"] <= counted <= most, (counted, most, world.outcomes)
