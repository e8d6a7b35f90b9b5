"""Every slot call of the adapter against the real server: what it does, and the traps that the rest must know of.

A server of its own: what slots hold is the subject here, and nobody else may put anything into them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from kvstream.adapters import LlamaCppBackend
from kvstream.adapters.base import Delta, Done, Failed, HttpCall, HttpReply, ProxyRequest
from kvstream.adapters.bodies import dumps
from kvstream.adapters.llamacpp_slotfile import head_bytes, read_head
from kvstream.adapters.llamacpp_slots import LlamaCppSlots
from kvstream.adapters.slot_calls import Identity, PromptWork, SlotDone
from tests.fakes.real import RealLlama, start_real

SLOTS, LAYERS, KV_BYTES = 4, 30, 23040  # SmolLM2-135M: 2 (K, V) x 30 layers x 192 x 2 bytes


class Server:
    """A server, and the adapter's calls performed on it."""

    def __init__(self, real: RealLlama) -> None:
        self.real = real
        self.backend = LlamaCppBackend(real.base_url)
        slots = self.backend.slots
        assert isinstance(slots, LlamaCppSlots)
        self.slots = slots

    def do(self, call: HttpCall) -> HttpReply:
        answer = httpx.request(call.method, self.real.base_url + call.path, content=call.body, timeout=180,
                               headers={**dict(call.headers), "connection": "close"}, trust_env=False)
        return HttpReply(answer.status_code, dict(answer.headers), answer.content)

    def done(self, call: HttpCall) -> SlotDone:
        done = self.slots.read_done(self.do(call))
        assert isinstance(done, SlotDone), done
        return done

    def failed(self, call: HttpCall) -> Failed:
        failed = self.slots.read_done(self.do(call))
        assert isinstance(failed, Failed), failed
        return failed

    def read(self, ids: list[int], slot: int | None) -> PromptWork:
        """Read a prompt into a slot and nothing else."""
        decoder = self.slots.prompt_decoder()
        events = decoder.feed(self.do(self.slots.read_prompt(ids, slot)).body) + decoder.finish()
        assert isinstance(events[-1], Done), events
        work = self.slots.prompt_work([event for event in events if isinstance(event, Delta)][-1].data)
        assert work is not None
        return work

    def complete(self, ids: list[int], slot: int, tokens: int = 3) -> tuple[PromptWork, str]:
        """A whole answer from a slot: what its prompt cost, and its text."""
        view = {"prompt": ids, "n_predict": tokens, "temperature": 0, "ignore_eos": True}
        request = ProxyRequest("/completion", dumps(view), view)
        answer = self.do(self.backend.encode(request, stream=False, slot=slot)).json()
        work = self.slots.prompt_work(answer)
        assert work is not None and work.slot == slot
        return work, answer["content"]

    def file(self, name: str) -> Path:
        return self.real.slots_dir / name

    def identity(self, **files: str) -> Identity:
        replies: dict[str, HttpReply | None] = {}
        while calls := self.slots.identity_calls(replies):
            replies |= {name: self.do(call) for name, call in calls}
        found = self.slots.read_identity(replies, files)
        assert found is not None
        return found


@contextmanager
def started(**params: Any) -> Iterator[Server]:
    with start_real(n_ctx=SLOTS * 512, n_parallel=SLOTS, n_batch=128, **params) as real:
        yield Server(real)


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with started() as server:
        yield server


def ids(tokens: int, first: int) -> list[int]:
    """A prompt that shares no token with one of another ``first``, whatever its place."""
    return [1000 + first * 1000 + place for place in range(tokens)]


def test_a_prompt_is_read_saved_and_restored_into_another_slot(server: Server) -> None:
    prompt = ids(90, 1)
    work = server.read(prompt, 1)
    assert (work.cached, work.computed, work.slot) == (0, 90, 1) and work.seconds
    saved = server.done(server.slots.save(1, "fork.kv"))
    assert (saved.slot, saved.tokens) == (1, 90)  # the prompt, not the token that n_predict 0 made all the same
    assert saved.bytes == server.file("fork.kv").stat().st_size
    restored = server.done(server.slots.restore(3, "fork.kv"))
    assert (restored.slot, restored.tokens, restored.bytes) == (3, 90, saved.bytes)
    again, text = server.complete([*prompt, 7, 8], 3)
    assert (again.cached, again.computed) == (90, 2)
    cold, plain = server.complete([*prompt, 7, 8], 2)
    assert (cold.cached, cold.computed) == (0, 92) and text and plain


def test_a_prompt_that_is_there_costs_one_token(server: Server) -> None:
    prompt = ids(60, 2)
    assert server.read(prompt, 0).cached == 0
    again = server.read(prompt, 0)
    assert (again.cached, again.computed) == (59, 1)
    longer = server.read([*prompt, 5, 6, 7], 0)
    assert (longer.cached, longer.computed) == (60, 3)
    other = server.read([*prompt[:20], *ids(10, 3)], 0)
    assert (other.cached, other.computed) == (20, 10)


def test_the_files_head_has_the_ids_that_were_sent(server: Server) -> None:
    prompt = ids(70, 4)
    _, text = server.complete(prompt, 1, tokens=5)
    saved = server.done(server.slots.save(1, "head.kv"))
    assert saved.tokens == 70 + 5 - 1 and text  # the last token of an answer is never in the slot
    with server.file("head.kv").open("rb") as file:
        head = read_head(file.read(head_bytes(saved.tokens)))
    assert head is not None and (head.tokens, head.media) == (74, False)
    assert list(head.ids[:70]) == prompt and len(head.ids) == 74
    answer = server.do(HttpCall("POST", "/detokenize", (), dumps({"tokens": list(head.ids[70:])}))).json()
    assert text.startswith(answer["content"])


def test_the_size_of_a_file_is_known_from_two_others(server: Server) -> None:
    sizes = {}
    for tokens in (16, 48):
        server.read(ids(tokens, 5), 2)
        sizes[tokens] = server.done(server.slots.save(2, f"size{tokens}.kv")).bytes
    per_token = (sizes[48] - sizes[16]) // 32
    assert per_token == KV_BYTES + 16
    assert sizes[16] - 16 * per_token == 48 + 4 * SLOTS + 24 * LAYERS
    server.done(server.slots.erase(2))
    empty = server.done(server.slots.save(2, "empty.kv"))
    assert (empty.tokens, empty.bytes) == (0, 32 + 4 * SLOTS)
    assert read_head(server.file("empty.kv").read_bytes()) is not None


def test_an_erased_slot_holds_nothing(server: Server) -> None:
    prompt = ids(40, 6)
    server.read(prompt, 0)
    view = server.slots.read_look(server.do(server.slots.look()))
    assert view is not None and len(view) == SLOTS
    assert (view[0].busy, view[0].tokens) == (False, 40) and view[0].task is not None
    assert server.done(server.slots.erase(0)).tokens == 40
    view = server.slots.read_look(server.do(server.slots.look()))
    assert view is not None and not view[0].tokens
    assert server.read(prompt, 0).cached == 0


@pytest.mark.parametrize("slot", [SLOTS + 1, 5 * SLOTS + 1])
def test_a_slot_that_is_not_there_is_another_one_and_the_answer_does_not_say_so(server: Server, slot: int) -> None:
    server.read(ids(30, 7), 1)
    wrapped = server.done(server.slots.save(slot, "wrapped.kv"))
    assert (wrapped.slot, wrapped.tokens) == (slot, 30)  # it is slot 1 that was saved
    assert server.done(server.slots.erase(slot)).tokens == 30
    assert server.read(ids(30, 7), 1).cached == 0


@pytest.mark.parametrize("name", ["../up.kv", "a/b.kv", "", ".", "x" * 300 + ".kv", "trailing."])
def test_names_that_are_refused(server: Server, name: str) -> None:
    server.read(ids(30, 8), 2)
    assert server.failed(server.slots.save(2, name)).status == 400
    assert server.failed(server.slots.restore(2, name)).status == 400
    assert server.read(ids(30, 8), 2).cached == 29  # a refused name costs nothing


def test_a_restore_that_fails_in_any_way_empties_the_slot(server: Server) -> None:
    prompt = ids(50, 9)
    server.read(prompt, 3)
    server.done(server.slots.save(3, "good.kv"))
    good = server.file("good.kv").read_bytes()
    server.file("cut.kv").write_bytes(good[:100])  # within the ids: see the next test for one that is cut in the KV
    server.file("none.kv").write_bytes(b"")
    server.file("junk.kv").write_bytes(b"junk" * 1000)
    for name in ("missing.kv", "cut.kv", "none.kv", "junk.kv"):
        server.done(server.slots.restore(3, "good.kv"))
        assert server.failed(server.slots.restore(3, name)).status == 400, name
        assert server.read(prompt, 3).cached == 0, name


def test_a_file_that_is_cut_in_its_kv_can_kill_the_server() -> None:
    """Measured: ``GGML_ASSERT(nread <= state_size)`` where it was saved from slot 3, a 400 where from slot 0. So a size
    is looked at before every single restore, and what a server began to write and did not finish is never offered."""
    with started() as server:
        server.read(ids(40, 15), 3)
        saved = server.done(server.slots.save(3, "cut.kv"))
        with server.file("cut.kv").open("r+b") as file:
            file.truncate(saved.bytes // 2)
        with pytest.raises(httpx.TransportError):
            server.do(server.slots.restore(1, "cut.kv"))
        assert server.real.process.wait(180) != 0


def test_a_changed_byte_is_not_noticed(server: Server) -> None:
    """Why every file has a checksum of ours."""
    prompt = ids(50, 10)
    server.read(prompt, 3)
    server.done(server.slots.save(3, "flip.kv"))
    data = bytearray(server.file("flip.kv").read_bytes())
    data[len(data) // 2] ^= 0xFF
    server.file("flip.kv").write_bytes(data)
    assert server.done(server.slots.restore(0, "flip.kv")).tokens == 50
    assert server.read(prompt, 0).cached == 49


def test_a_save_that_fails_says_500_and_keeps_the_slot(server: Server) -> None:
    server.read(ids(30, 11), 1)
    server.file("folder.kv").mkdir()
    assert server.failed(server.slots.save(1, "folder.kv")).status == 500
    assert server.read(ids(30, 11), 1).cached == 29


def test_a_prompt_that_is_too_long_is_refused_before_anything_is_read(server: Server) -> None:
    server.read(ids(30, 12), 2)
    answer = server.do(server.slots.read_prompt(ids(600, 13), 2))
    assert answer.status == 400 and server.backend.error(answer).kind == "context_length_exceeded"
    assert server.read(ids(30, 12), 2).cached == 29


def test_a_file_outlives_the_server_and_its_identity_does_too() -> None:
    prompt = ids(60, 14)
    found: list[Identity] = []
    kept = b""
    for _ in range(2):
        with started() as server:
            found.append(server.identity(size="1", mtime_ns="2"))
            found.append(server.identity())
            assert found[-1].facts["model_path"] and Path(found[-1].facts["model_path"]).exists()
            if kept:
                server.file("kept.kv").write_bytes(kept)
                assert server.done(server.slots.restore(2, "kept.kv")).tokens == 60
                assert server.read([*prompt, 9], 2).cached == 60
            else:
                server.read(prompt, 0)
                server.done(server.slots.save(0, "kept.kv"))
                kept = server.file("kept.kv").read_bytes()
    seen, unseen, seen_again, unseen_again = found
    assert seen.digest == seen_again.digest and (seen.context, seen.slots) == (512, SLOTS)
    assert unseen.digest != unseen_again.digest  # without the model's file nobody knows whether it is the same


def test_a_server_without_a_folder_says_501() -> None:
    with started(slot_save_path="") as server:
        for call in (server.slots.save(0, "a.kv"), server.slots.restore(0, "a.kv"), server.slots.erase(0)):
            assert server.failed(call).status == 501
