"""Which lane serves a request.

The name of the model decides first (``names``). A request that names none goes to the first lane that serves its route.
A name that no lane knows goes to a lane whose list is not known, since it may be there; only when every list is known
it is a 404. A single llama.cpp server that lists one model answers to any name, as it does without us.

Where several lanes serve a model: the one with the smallest ``load - cached``. ``load`` is its requests in hand per
seat, ``cached`` the part of this prompt (0 to 1) whose pages its scheduler knows. So a wholly known prompt is worth one
full batch of load, an unknown one goes where least is to do, and at a tie the order of the configuration decides.

A lane that is down, failed, closing or behind an open breaker is passed over. A connection that is refused before
anything of the answer came moves the request to another lane, once; so does a lane that goes down, or whose breaker
opens, while it waits there.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager

import trio
from attrs import define, evolve, field, frozen

from ..adapters.base import Health, ProxyRequest, UpstreamEvent
from ..adapters.routes import route_of
from ..errors import (
    BackendRefusedError,
    BackendUnavailableError,
    KVStreamError,
    ModelNotFoundError,
    RouteUnsupportedError,
    ShuttingDownError,
)
from .borrowed import Borrowed
from .count import PromptCount
from .engine import Engine
from .listing import FRESH_S, KeptList, refresh
from .names import NAMES_SHOWN_MAX, Names, asked_for, listing_of, renamed, renamed_data, target_of
from .ports import Answer
from .request import Incoming
from .stream import Stream

log = logging.getLogger("kvstream.router")

UNKNOWN_S_MAX = 0.03  # how long a name that nobody knows waits for lists that may have grown
CHOICE_S_MAX = 0.25  # how long lanes may take to count a prompt, to be compared by what they know of it


@define(eq=False)
class Lane:
    """A lane as the router sees it. ``names`` may be replaced while it serves."""

    engine: Engine
    names: Names = field(factory=Names)
    listed: KeptList = field(init=False)

    def __attrs_post_init__(self) -> None:
        self.listed = KeptList(self.engine)

    @property
    def name(self) -> str:
        return self.engine.name

    def target(self, model: str) -> str | None:
        """See :func:`names.target_of`."""
        return target_of(model, self.names, self.listed.known.names if self.listed.known else ())

    def serves_only(self, alone: bool) -> bool:
        """Whether it serves the models it names and no other. llama.cpp with one model looks at no name."""
        if self.names.models:
            return True
        known = self.listed.known
        return known is not None and not (alone and self.engine.adapter.kind == "llamacpp" and len(known.entries) < 2)

    @property
    def serving(self) -> bool:
        """Whether a newcomer would be taken and has a chance, as far as is known. Behind a half open breaker it is the
        trial, and one is enough."""
        engine = self.engine
        if engine.closing or (engine.state == "half_open" and engine.streams):
            return False
        return engine.state not in (Health.DOWN, "failed", "breaker_open", "wedged")

    @property
    def gone(self) -> bool:
        """Whether those that wait here wait for a backend that does not serve. (A half open breaker has its trial, and
        that is one of those.)"""
        return self.engine.state in (Health.DOWN, "failed", "breaker_open", "wedged")

    @property
    def load(self) -> float:
        """Requests in hand per seat, waiting ones and draining seats included: from 1.0 on a newcomer has to wait."""
        engine = self.engine
        capacity = engine.watcher.backend.capacity
        seats = min(engine.settings.scheduler.seats_max, capacity.limits.seats if capacity else 1)
        return (len(engine.streams) + len(engine.slot_view().draining)) / max(1, seats)

    @property
    def shown(self) -> list[str]:
        return [str(entry["id"]) for entry in listing_of(self.names, self.listed.known)]


@frozen(eq=False)
class Choice:
    """A lane that can serve a request, the request as that lane gets it, and the name to put back into the answer."""

    lane: Lane
    incoming: Incoming
    renamed: str | None = None
    count: PromptCount | None = None
    cached: float = 0.0  # the part of the prompt that its scheduler knows

    @property
    def cost(self) -> float:
        """At this moment."""
        return self.lane.load - self.cached


class Router:
    """The lanes of one gateway, in the order of the configuration; at least one. ``lanes`` may be replaced."""

    def __init__(self, lanes: Sequence[Lane]) -> None:
        self.lanes = tuple(lanes)

    @property
    def routes(self) -> frozenset[str]:
        """What at least one lane serves."""
        return frozenset().union(*(lane.engine.adapter.capabilities.routes for lane in self.lanes))

    @property
    def what_there_is(self) -> str:
        """The routes in words, for those who asked for another one."""
        own = "/v1/models, /health, /ready, /status and /metrics"
        return f"the backends here serve {', '.join(sorted(self.routes))}; KVStream itself {own}"

    async def pick(self, incoming: Incoming) -> tuple[Engine, ProxyRequest]:
        """See :data:`ports.PickBackend`."""
        [choice, *_] = await self._choices(incoming)
        if choice.lane.engine.closing:
            raise ShuttingDownError("the gateway is shutting down", retry_after_s=5)
        return choice.lane.engine, choice.incoming.proxy

    @asynccontextmanager
    async def open_answer(self, incoming: Incoming, name: str) -> AsyncIterator[Answer]:
        """See :data:`ports.OpenAnswer`.

        *Errors*: also ``ModelNotFoundError``, ``RouteUnsupportedError``.
        """
        async with AsyncExitStack() as stack:
            while True:
                lanes = self.lanes
                answer = _Routed(stack, await self._ranked(await self._choices(incoming)), name)
                try:
                    await answer.open()
                    break
                except ShuttingDownError:  # its lane was retired while we chose it
                    if lanes is self.lanes:
                        raise
            yield answer.plain

    # --- by name ------------------------------------------------------------------------------------------------------

    async def _choices(self, incoming: Incoming) -> list[Choice]:
        """The lanes that serve the model, those that can take it now before the others; never empty."""
        model, route = incoming.proxy.model, incoming.proxy.route
        if not model:
            lanes = [lane for lane in self.lanes if route in lane.engine.adapter.capabilities.routes]
            choices = [Choice(lane, incoming) for lane in lanes]
            # Text of another model is better than none; vectors of another model are wrong, and nobody would notice.
            return (_serving_first(choices) if route_of(route).generates else choices)[:1]
        choices = self._of_model(incoming)
        if not choices:
            await refresh(self.lanes, UNKNOWN_S_MAX, older_s=FRESH_S)
            choices = self._of_model(incoming)
        if not choices:
            raise self._unknown(model)
        able = [c for c in choices if route in c.lane.engine.adapter.capabilities.routes]
        if not able:
            raise RouteUnsupportedError(f"the backend of model {model[:200]!r} has no {route}", param="model")
        return _serving_first(able)

    def _of_model(self, incoming: Incoming) -> list[Choice]:
        found = []
        for lane in self.lanes:
            target = lane.target(incoming.proxy.model)
            if target is not None:
                asked = evolve(incoming, proxy=asked_for(incoming.proxy, target))
                back = incoming.proxy.model if lane.names.rewrite and target != incoming.proxy.model else None
                found.append(Choice(lane, asked, back))
        alone = len(self.lanes) == 1
        return found or [Choice(lane, incoming) for lane in self.lanes if not lane.serves_only(alone)]

    def _unknown(self, model: str) -> ModelNotFoundError:
        names = list(dict.fromkeys(name for lane in self.lanes for name in lane.shown))
        shown = ", ".join(names[:NAMES_SHOWN_MAX]) + (", ..." if len(names) > NAMES_SHOWN_MAX else "")
        return ModelNotFoundError(
            f"no backend has a model {model[:200]!r}; there are: {shown or 'none'}", param="model")

    # --- by prefix and load -------------------------------------------------------------------------------------------

    async def _ranked(self, choices: list[Choice]) -> list[Choice]:
        able = [c for c in choices if c.lane.serving]
        if len(able) < 2:
            return choices
        weighed: dict[int, Choice] = {}

        async def weigh(index: int, choice: Choice) -> None:
            weighed[index] = await _weighed(choice)

        with trio.move_on_after(CHOICE_S_MAX):
            async with trio.open_nursery() as nursery:
                for index, choice in enumerate(able):
                    nursery.start_soon(weigh, index, choice)
        # Nothing is awaited from here until the request has its place: of a burst, each sees those before it.
        return sorted((weighed.get(i) or c for i, c in enumerate(able)), key=lambda c: c.cost)


async def _weighed(choice: Choice) -> Choice:
    engine = choice.lane.engine
    count = await engine.count_prompt(choice.incoming.proxy, choice.incoming.client)
    cached = engine.scheduler.prefix_tokens(count.keys, trio.current_time())
    return evolve(choice, count=count, cached=min(1.0, cached / max(1, count.tokens)))


def _serving_first(choices: list[Choice]) -> list[Choice]:
    return sorted(choices, key=lambda choice: not choice.lane.serving)


class _Routed(Borrowed):
    """An answer that may move to another lane before it began, and whose model may have another name there."""

    def __init__(self, stack: AsyncExitStack, choices: Sequence[Choice], name: str) -> None:
        self._stack = stack
        self._choices = list(choices)
        self._name = name
        self._answer: Stream
        self._renamed: str | None = None
        self._began = False  # events came, or it has moved: it stays where it is
        self._first: list[UpstreamEvent] = []
        self._lost: BackendRefusedError | None = None  # its lane cannot serve it any more

    async def open(self) -> None:
        """Enter the first lane, or the second. *Errors*: as ``Engine.open_stream``."""
        try:
            await self._enter(self._choices[0], hold=not any(c.lane.serving for c in self._choices[1:]))
        except BackendUnavailableError as error:
            if not await self._move(error):
                raise

    @property
    def plain(self) -> Answer:
        """The stream itself where nothing can happen to it here."""
        return self if len(self._choices) > 1 or self._renamed is not None else self._answer

    async def _enter(self, choice: Choice, *, hold: bool) -> None:
        incoming = choice.incoming
        self._answer = await self._stack.enter_async_context(choice.lane.engine.open_stream(
            incoming.proxy, client=incoming.client, priority=incoming.priority, weight=incoming.weight,
            name=self._name, count=choice.count, hold=hold))
        self._renamed = choice.renamed

    async def _move(self, error: BackendUnavailableError) -> bool:
        """Go to the next lane, once; False when there is none. Nothing of the first lane's answer was seen."""
        others = [choice for choice in self._choices[1:] if choice.lane.serving]
        if self._began or not others:
            return False
        await self._enter(others[0], hold=True)
        log.warning("request %s: moved from backend %s to %s: %s", self._name, self._choices[0].lane.name,
                    others[0].lane.name, error.message)
        others[0].lane.engine.metrics.failovers.inc()
        self._began = True  # once
        return True

    async def get(self) -> list[UpstreamEvent]:
        """See :class:`ports.Answer`."""
        if not self._began and self._lost is None:
            await self._begin()
        if self._lost is not None:
            if not await self._move(self._lost):
                raise self._lost
            self._lost = None
        events, self._first = self._first or await self._answer.get(), []
        return [renamed(event, self._renamed) for event in events] if self._renamed is not None else events

    async def _begin(self) -> None:
        """Wait for the first events, or for the reason to go elsewhere. Both are kept, so that a cancelled wait loses
        neither. *Errors*: how the request ended, if elsewhere it would not end better."""
        failed: KVStreamError | None = None
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._wait_lost, nursery.cancel_scope)
            try:
                first = await self._answer.get()
                if self._lost is None:
                    self._first, self._began = first, True
            except BackendRefusedError as error:
                self._lost = error
            except KVStreamError as error:  # out of the nursery, which would wrap it
                failed = error
            nursery.cancel_scope.cancel()
        if failed is not None:
            raise failed

    async def _wait_lost(self, scope: trio.CancelScope) -> None:
        """Cancel ``scope`` when the lane is down, the request still waits, and another lane could have it."""
        lane = self._choices[0].lane
        while not lane.gone or self._answer.lease is not None or not any(c.lane.serving for c in self._choices[1:]):
            await lane.engine.watcher.wait_change()
        self._lost = BackendRefusedError("the backend went down while the request waited for it", retry_after_s=2)
        lane.engine.leave(self._answer)
        scope.cancel()

    # --- the rest of an answer, of the lane it is in now --------------------------------------------------------------

    @property
    def request(self) -> ProxyRequest:
        return self._answer.request

    @property
    def source(self) -> Answer:
        return self._answer

    @property
    def last_data(self) -> object:
        data = self._answer.last_data
        return data if self._renamed is None else renamed_data(data, self._renamed)

    @property
    def headers(self) -> tuple[tuple[bytes, bytes], ...]:
        return self._answer.headers

    @property
    def error_forwarded(self) -> bool:
        return self._answer.error_forwarded

    @error_forwarded.setter
    def error_forwarded(self, value: bool) -> None:
        self._answer.error_forwarded = value
