"""Models on which restoring a slot has little effect or none, on the real server (issue 4, section 6.5).

Their state is no plain KV: a recurrent one is of one point in time, a window forgets. The server keeps *checkpoints* of
it, by default also in a slot's file. All calls answer 200 whatever comes of them; only the next request tells. So what
a restore is worth is measured, never believed.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvstream.adapters.base import CapacityQuery, HttpReply
from kvstream.core.types import PoolMode
from tests.e2e.test_slot_calls import Server, ids
from tests.fakes.real import start_real
from tests.fakes.tiny_gguf import Kind, make

TOKENS = 200


@pytest.fixture
def server(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Server]:
    kind, more = request.param
    model = str(make(kind, tmp_path / "m.gguf"))
    with start_real(n_ctx=4 * 512, n_parallel=4, n_batch=128, model=model, **more) as real:
        yield Server(real)


def found(server: Server, prompt: list[int], asked: list[int]) -> int:
    """How many tokens of ``asked`` a slot has into which one was restored that had read ``prompt``."""
    server.read(prompt, 0)
    saved = server.done(server.slots.save(0, "a.kv"))
    restored = server.done(server.slots.restore(1, "a.kv"))
    assert saved.tokens == restored.tokens == len(prompt)
    assert saved.bytes == restored.bytes == server.file("a.kv").stat().st_size
    return server.read(asked, 1).cached


NONE: dict[str, Any] = {"n_ctx_checkpoints": 0}
FULL: dict[str, Any] = {"swa_full": True}


def case(kind: Kind, same: range, longer: range, part: range, **more: Any) -> Any:
    name = "-".join([kind, *more])
    return pytest.param((kind, more), same, longer, part, id=name)


ALL, NOTHING = range(TOKENS - 1, TOKENS + 1), range(1)
NEARLY = range(TOKENS - 8, TOKENS + 1)  # back to the last checkpoint
LESS = range(99)  # back to one before that, if there is one


@pytest.mark.parametrize(("server", "same", "longer", "part"), [
    case("llama", ALL, ALL, range(99, 101)),
    case("mamba", NEARLY, ALL, LESS),
    case("mamba", NOTHING, ALL, NOTHING, **NONE),
    case("gemma3", NEARLY, NEARLY, LESS),
    case("gemma3", NOTHING, NOTHING, NOTHING, **NONE),
    case("gemma3", ALL, ALL, NOTHING, **FULL),
], indirect=["server"])
def test_what_a_restored_slot_has_of_a_prompt(server: Server, same: range, longer: range, part: range) -> None:
    """``same``: the prompt that was saved; ``longer``: continued; ``part``: its first half, and then something else."""
    prompt = ids(TOKENS, 1)
    assert found(server, prompt, prompt) in same
    assert found(server, prompt, [*prompt, 7, 8, 9]) in longer
    assert found(server, prompt, [*prompt[:100], 7, 8, 9]) in part
    assert server.read(ids(20, 2), 2).computed == 20  # and it serves on


@pytest.mark.parametrize("unified", [False, True])
def test_the_layout_of_two_caches_is_seen_too(unified: bool, tmp_path: Path) -> None:
    """A model with a window has a cache for it beside the other; its empty slot is bigger, and tells the same."""
    model = str(make("gemma3", tmp_path / "m.gguf"))
    with start_real(n_ctx=2048, n_parallel=4, kv_unified=unified, model=model) as real:
        server = Server(real)
        replies: dict[str, HttpReply | None] = {}
        while calls := [(name, call) for name, call in server.backend.capacity_calls(replies) if name not in replies]:
            replies |= {name: server.do(call) for name, call in calls}
        limits = server.backend.read_capacity(replies, CapacityQuery(page_tokens=16)).limits
        assert limits.mode is (PoolMode.UNIFIED if unified else PoolMode.SPLIT) and limits.pages == 128


def test_a_model_is_the_same_bytes_every_time(tmp_path: Path) -> None:
    for kind in ("llama", "mamba", "gemma3"):
        one, other = (make(kind, tmp_path / name).read_bytes() for name in ("a", "b"))
        assert one == other and len(one) < 2**23
