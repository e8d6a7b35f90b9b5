"""The store of KV files: what is offered, what may be written, what must go first."""

from __future__ import annotations

from typing import Any

import pytest

from kvstream.core.messages import SlotSaved
from kvstream.core.pool import PagePool
from kvstream.core.saved import SavedStore
from kvstream.core.types import PageKey, RequestId, SavedPrefix, SlotRules, Tier
from tests.play import PAGE, keys_of

RULES = SlotRules(4, identity="ab12", token_bytes=10.0, fixed_bytes=100)


def store(pages: int = 100, size: int = 100_000, **more: Any) -> SavedStore:
    made = SavedStore(pages, size, tokens_min=PAGE, **more)
    made.set_rules(more.pop("rules", RULES))
    return made


def save(it: SavedStore, prompt: str, tokens: int, now: float = 0.0, *, size: int | None = None,
         why: Any = "evict") -> tuple[str, tuple[str, ...]]:
    """Plan and carry out; the name and everything to forget."""
    planned = it.plan_save(keys_of(prompt, tokens), tokens, why, now)
    assert planned is not None
    spec, gone = planned
    it.check()
    event = SlotSaved(0, spec.name, True, spec.tokens, it.bytes_for(tokens) if size is None else size, keys=spec.keys)
    more = it.saved(event, now)
    it.check()
    return spec.name, (*gone, *more)


def test_the_file_with_the_longest_common_beginning_is_offered() -> None:
    it = store()
    short, _ = save(it, "aab", 48)
    other, _ = save(it, "aac", 160)
    found = it.match(keys_of("aacd", 300))
    assert found is not None and (found[0].name, found[1]) == (other, 3)
    found = it.match(keys_of("aab", 300))
    assert found is not None and (found[0].name, found[1]) == (short, 3)
    found = it.match(keys_of("a", 32))
    assert found is not None and (found[0].name, found[1]) == (short, 2)  # the fewest bytes of the two
    assert it.match(keys_of("b", 300)) is None and it.match(()) is None


def test_equal_digests_of_other_content_are_no_match() -> None:
    it = store()
    mine = (PageKey(b"\x01", b"one"), PageKey(b"\x02", b"two"))
    for name, keys in (("x.kv", mine), ("y.kv", (PageKey(b"\x01", b"ONE"), PageKey(b"\x03", b"two")))):
        it.load([*it.entries(), SavedPrefix(name, keys, 32, 10)])
        it.check()
    found = it.match((mine[0], PageKey(b"\x02", b"TWO")))
    assert found is not None and (found[0].name, found[1]) == ("x.kv", 1)
    assert it.match((PageKey(b"\x01", b"ONE"), PageKey(b"\x03", b"two"))) is None


def test_nothing_is_offered_before_it_is_on_disk_nor_after_a_save_that_failed() -> None:
    it = store()
    keys = keys_of("a", 64)
    planned = it.plan_save(keys, 64, "evict", 0)
    assert planned is not None and it.match(keys) is None and it.pages == 4
    spec = planned[0]
    assert spec.name == f"ab12{keys[-1].digest.hex()}.kv"
    assert it.plan_save(keys, 64, "evict", 0) is None  # on its way
    assert it.saved(SlotSaved(0, spec.name, False), 1) == ()
    assert it.match(keys) is None and (it.pages, it.bytes, it.host.held) == (0, 0, 0)
    assert it.plan_save(keys, 64, "evict", 0) is not None


@pytest.mark.parametrize("tokens, keys", [(63, None), (0, None), (64, keys_of("b", 64))])
def test_a_file_that_is_not_what_was_planned_goes(tokens: int, keys: tuple[PageKey, ...] | None) -> None:
    it = store()
    planned = it.plan_save(keys_of("a", 64), 64, "evict", 0)
    assert planned is not None
    event = SlotSaved(0, planned[0].name, True, tokens, 700, keys=keys or planned[0].keys)
    assert it.saved(event, 0) == (planned[0].name,)
    assert it.match(keys_of("a", 64)) is None and it.match(keys_of("b", 64)) is None and it.bytes == 0


def test_a_file_may_hold_more_than_was_planned() -> None:
    it = store()
    planned = it.plan_save(keys_of("ab", 32), 40, "evict", 0)
    assert planned is not None
    it.saved(SlotSaved(0, planned[0].name, True, 96, 700, keys=keys_of("ab", 96)), 0)
    it.check()
    found = it.match(keys_of("ab", 200))
    assert found is not None and found[1] == 6 and it.pages == 6


def test_what_a_file_has_already_is_not_written_again() -> None:
    it = store()
    save(it, "a", 640)
    assert it.plan_save(keys_of("a", 320), 320, "evict", 1) is None
    assert it.plan_save(keys_of("a", 640), 655, "evict", 1) is None
    assert it.plan_save(keys_of("a", 656), 656, "evict", 1) is None  # one page of 41: nothing
    assert it.plan_save(keys_of("a", 656), 656, "fork", 1) is not None  # somebody waits for that one
    assert it.plan_save(keys_of("a", 720), 720, "evict", 1) is not None
    assert it.plan_save(keys_of("b", 15), 15, "evict", 1) is None  # too short
    assert it.plan_save((), 640, "evict", 1) is None


def test_room_is_made_before_the_write_the_least_recently_used_first() -> None:
    it = store(pages=12)
    names = [save(it, prompt, 64, now)[0] for now, prompt in enumerate("abc")]
    it.used(names[0], 5)
    planned = it.plan_save(keys_of("d", 64), 64, "evict", 6)
    assert planned is not None and planned[1] == (names[1],)
    it.check()
    assert it.match(keys_of("b", 64)) is None and it.match(keys_of("a", 64)) is not None
    assert it.plan_save(keys_of("e", 208), 208, "evict", 6) is None  # more than there is
    assert it.match(keys_of("a", 64)) is not None


def test_bytes_bound_as_pages_do() -> None:
    it = store(size=1600)  # 740 for 64 tokens
    names = [save(it, prompt, 64, now)[0] for now, prompt in enumerate("ab")]
    assert save(it, "c", 64, 3)[1] == (names[0],)
    assert it.bytes <= 1600


def test_what_is_held_or_owned_is_never_given_up() -> None:
    it = store(pages=8)
    first, _ = save(it, "a", 64, 0)
    it.hold(first, RequestId(1))
    swap = it.plan_save(keys_of("b", 48), 60, "swap", 1, rid=RequestId(7))
    assert swap is not None and swap[0].name == "sab12x7.kv" and swap[1] == ()
    assert it.owned(RequestId(7)) is None
    it.saved(SlotSaved(0, swap[0].name, True, 60, 700, keys=swap[0].keys, rid=RequestId(7)), 1)
    it.check()
    owned = it.owned(RequestId(7))
    assert owned is not None and owned.tokens == 60 and it.match(keys_of("b", 48)) is None
    assert it.plan_save(keys_of("c", 16), 16, "evict", 2) is None
    it.release(RequestId(1))
    planned = it.plan_save(keys_of("c", 16), 16, "evict", 2)
    assert planned is not None and planned[1] == (first,)
    assert it.forget_owned(RequestId(7)) == (swap[0].name,) and it.forget_owned(RequestId(7)) == ()
    it.check()
    assert it.pages == 1


def test_a_request_that_left_while_its_state_was_written() -> None:
    it = store()
    swap = it.plan_save((), 10, "swap", 1, rid=RequestId(7))
    assert swap is not None
    assert it.forget_owned(RequestId(7)) == ()
    assert it.saved(SlotSaved(0, swap[0].name, True, 10, 700), 2) == (swap[0].name,)
    assert it.saved(SlotSaved(0, "other.kv", False), 2) == ()
    assert it.pages == it.bytes == 0


def test_a_longer_file_replaces_a_shorter_one_once_it_is_there() -> None:
    it = store()
    short, _ = save(it, "a", 320, 0)
    planned = it.plan_save(keys_of("a", 640), 640, "evict", 1)
    assert planned is not None and planned[1] == ()
    assert it.match(keys_of("a", 640)) is not None  # still there: the write may fail
    assert it.saved(SlotSaved(0, planned[0].name, True, 640, 6500, keys=planned[0].keys), 1) == (short,)
    assert (it.replaced, it.evicted) == (1, 0)  # nothing was given up for room
    it.check()


def test_a_hot_and_much_smaller_file_stays() -> None:
    it = store(pages=1000)
    small, _ = save(it, "a", 160, 0)
    for now in (1, 2):
        it.used(small, now)
    assert save(it, "a", 640, 3)[1] == ()
    found = it.match(keys_of("a", 160))
    assert found is not None and found[0].name == small
    held, _ = save(it, "b", 160, 4)
    it.hold(held, RequestId(1))
    assert save(it, "b", 320, 5)[1] == ()


def test_a_file_larger_than_expected_is_paid_for_afterwards() -> None:
    it = store(size=3000)
    first, _ = save(it, "a", 64, 0)
    name, gone = save(it, "b", 64, 1, size=2900)
    assert gone == (first,) and it.bytes == 2900 and it.bytes_for(64) == 2900
    it.set_rules(SlotRules(4, identity="cd"))
    other, gone = save(it, "c", 64, 2, size=3001)
    assert gone == (other,) and it.bytes == 0 and name != other


def test_the_size_of_a_token_is_learned_where_nobody_told() -> None:
    it = store()
    it.set_rules(SlotRules(4, identity="cd"))
    assert it.bytes_for(64) == 0
    save(it, "a", 64, size=6400)
    assert it.bytes_for(10) == 1000


def test_files_of_another_identity_are_not_offered_and_come_back_with_theirs() -> None:
    it = store()
    name, _ = save(it, "a", 64)
    swap = it.plan_save((), 10, "swap", 1, rid=RequestId(7))
    assert swap is not None
    it.saved(SlotSaved(0, swap[0].name, True, 10, 200), 1)
    entries = it.entries()
    writing = it.plan_save(keys_of("b", 64), 64, "evict", 2)
    assert it.set_rules(RULES) == () and len(it.entries()) == 2
    assert it.set_rules(SlotRules(4, identity="cd34")) == (swap[0].name,)
    it.check()
    assert it.match(keys_of("a", 64)) is None and it.pages == it.bytes == 0
    assert writing is not None  # it comes too late, and nobody would ever delete it
    assert it.saved(SlotSaved(0, writing[0].name, True, 64, 740, keys=writing[0].keys), 3) == (writing[0].name,)
    assert it.set_rules(None) == () and it.plan_save(keys_of("a", 64), 64, "evict", 2) is None
    it.set_rules(RULES)
    assert it.load([entry for entry in entries if entry.keys]) == ()
    found = it.match(keys_of("a", 64))
    assert found is not None and found[0].name == name


def test_loading_more_than_fits_keeps_what_was_used_last() -> None:
    it = store(pages=8)
    used = {"a": 3, "b": 1, "c": 2}
    entries = [SavedPrefix(f"ab12{p}.kv", keys_of(p, 64), 64, 740, used_at=at) for p, at in used.items()]
    assert it.load([*entries, SavedPrefix("ab12z.kv", (), 64, 740)]) == ("ab12z.kv", "ab12b.kv")
    it.check()
    assert it.load(entries[:1]) == () and [e.name for e in it.entries()] == ["ab12a.kv"]


def test_what_is_being_written_or_owned_survives_a_load() -> None:
    it = store()
    writing = it.plan_save(keys_of("b", 64), 64, "evict", 0)
    swap = it.plan_save((), 10, "swap", 1, rid=RequestId(7))
    assert writing is not None and swap is not None
    it.saved(SlotSaved(0, swap[0].name, True, 10, 200), 1)
    it.load([])
    it.check()
    assert it.owned(RequestId(7)) is not None
    assert it.saved(SlotSaved(0, writing[0].name, True, 64, 740), 2) == () and it.match(keys_of("b", 64)) is not None


def test_a_restore_that_failed_drops_the_file_and_its_holds() -> None:
    it = store()
    name, _ = save(it, "a", 64)
    it.hold(name, RequestId(1))
    it.failed(name)
    it.failed(name)
    it.check()
    assert it.match(keys_of("a", 64)) is None and it.pages == 0


def test_files_expire_by_their_last_use() -> None:
    it = store(ttl_s=10)
    first, _ = save(it, "a", 64, 0)
    other, _ = save(it, "b", 64, 1)
    assert it.next_expiry() == 10
    it.used(first, 5)
    assert it.next_expiry() == 11 and it.expire(10.9) == ()
    it.hold(other, RequestId(1))
    assert it.next_expiry() == 15 and it.expire(14) == ()
    it.release(RequestId(1))
    assert it.expire(14) == (other,) and it.expire(15) == (first,) and it.next_expiry() is None
    assert store().next_expiry() is None


def test_a_plan_given_up_frees_its_room() -> None:
    it = store(pages=4)
    planned = it.plan_save(keys_of("a", 64), 64, "evict", 0)
    assert planned is not None and it.plan_save(keys_of("b", 64), 64, "evict", 0) is None
    it.forget(planned[0].name)  # no file yet, so nothing to forget
    assert it.pages == 4
    it.abandon(planned[0].name)
    assert it.pages == 0 and it.plan_save(keys_of("b", 64), 64, "evict", 0) is not None


def test_pages_are_counted_in_the_pool_of_the_ledger() -> None:
    host = PagePool(8, Tier.HOST)
    it = SavedStore(0, 100_000, host=host, tokens_min=PAGE)
    it.set_rules(RULES)
    save(it, "a", 64)
    assert host.held == 4
    host.resize(2)
    assert it.plan_save(keys_of("b", 48), 48, "evict", 1) is None
    planned = it.plan_save(keys_of("b", 32), 32, "evict", 1)
    assert planned is not None and len(planned[1]) == 1 and host.held == 2
    host.check()


def test_another_page_size_makes_files_unfindable() -> None:
    it = store()
    name, _ = save(it, "a", 64)
    assert it.set_pages(16) == () and it.set_pages(32) == (name,)
    assert it.pages == 0
