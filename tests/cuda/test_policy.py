"""The split of the pool: published decisions and a published trace, then what must hold for every pool."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st

from kvstream.cuda.policy import COOLDOWN, DECODE_TOKENS_MAX, Feedback, Policy, Split

POOL_CELLS = (2048 << 20) // 425984  # 2048 MiB of pages of 256 tokens: Q8_0 K and Q4_0 V, 4 heads of 256
PREFILL = 512


def policy_of(cells: int, layers: int, resident: int, ring: int, **state: Any) -> Policy:
    """A policy in the middle of its life. Its smallest ring is that of a new pool unless given."""
    ring_min = state.pop("ring_min", Policy.opened(cells, layers).ring)
    policy = Policy(cells, layers, resident, ring_min, **state)
    assert policy.ring == ring, "the vector is not one"
    return policy


# --- what was published -----------------------------------------------------------------------------------------------

LATE = Feedback(100, 12, busy=0.70, peak=1.0)
LATE_AND_SATURATED = Feedback(100, 12, busy=0.99, peak=1.0)
IDLE = Feedback(100, 0, busy=0.10, peak=0.20)
FINE = Feedback(100, 0, busy=0.60, peak=0.90)

DECISIONS: list[Any] = [
    pytest.param(6971, 16, 673, 435, 11, {"ring_min": 11}, None, (418, 283), id="jump when a page is entered"),
    pytest.param(6971, 16, 673, 435, 11, {"ring_min": 11, "cooldown": 50}, None, (418, 283), id="cooldown or not"),
    pytest.param(630, 16, 257, 38, 22, {"ring_min": 22, "starved": 2, "layout_pages": 257}, FINE, (23, 262),
                 id="too much resident three times"),
    pytest.param(630, 16, 257, 38, 22, {"ring_min": 22, "starved": 1, "layout_pages": 257}, FINE, (38, 22),
                 id="too much resident twice"),
    pytest.param(7010, 16, 716, 368, 1122, {}, None, (416, 354), id="heal"),
    pytest.param(7010, 16, 716, 368, 1122, {"cooldown": 1}, None, (368, 1122), id="no healing in the cooldown"),
    pytest.param(160, 16, 12, 9, 16, {"starved": 2, "layout_pages": 12}, LATE, (8, 32), id="starving three times"),
    pytest.param(160, 16, 12, 9, 16, {"starved": 2, "layout_pages": 12, "cooldown": 1}, LATE, (9, 16),
                 id="starving in the cooldown"),
    pytest.param(39, 16, 65, 1, 23, {"ring_min": 23}, None, (0, 39), id="nothing can stay"),
    pytest.param(160, 16, 12, 9, 16, {"starved": 2, "layout_pages": 12}, LATE_AND_SATURATED, (9, 16),
                 id="a saturated link"),
    pytest.param(160, 16, 12, 8, 32, {"spare": 7, "layout_pages": 12}, IDLE, (9, 16), id="spare eight times"),
    pytest.param(160, 16, 12, 8, 32, {"spare": 6, "layout_pages": 12}, IDLE, (8, 32), id="spare seven times"),
    pytest.param(160, 16, 12, 8, 32, {"spare": 7, "layout_pages": 12}, FINE, (8, 32), id="not spare"),
    pytest.param(160, 16, 12, 8, 32, {"spare": 7, "layout_pages": 12}, evolve(IDLE, busy=0.6), (8, 32), id="busy"),
    pytest.param(160, 16, 12, 8, 32, {"spare": 7, "layout_pages": 12}, evolve(IDLE, peak=0.6), (8, 32), id="in use"),
    pytest.param(160, 16, 12, 8, 32, {"spare": 7, "layout_pages": 12}, evolve(IDLE, misses=2), (8, 32), id="late"),
    pytest.param(160, 16, 12, 9, 16, {"spare": 7, "layout_pages": 12}, IDLE, (9, 16), id="no more than the target"),
]


@pytest.mark.parametrize(("cells", "layers", "active", "resident", "ring", "state", "feedback", "expected"), DECISIONS)
def test_decisions(cells: int, layers: int, active: int, resident: int, ring: int, state: dict[str, Any],
                   feedback: Feedback | None, expected: tuple[int, int]) -> None:
    policy = policy_of(cells, layers, resident, ring, **state)
    after, split = policy.step(active, 1, feedback)
    assert (split.resident, split.ring) == (after.resident, after.ring) == expected
    if expected != (resident, ring):
        assert after.cooldown == COOLDOWN and after.starved == after.spare == 0


# Context and, of the published trace: pages, residents per layer, ring, pages that do not fit, split layers; then pages
# that stream without each split layer's last one (which grows), MiB of them, copies.
TRACE = [
    (65536, 257, 314, 17, 0, 0, 0, 0.0, 0),
    (81920, 321, 314, 17, 112, 7, 105, 42.66, 14),
    (98304, 385, 309, 97, 1216, 13, 1203, 488.72, 26),
    (131072, 513, 300, 241, 3408, 15, 3393, 1378.41, 30),
    (163584, 640, 291, 385, 5584, 15, 5569, 2262.41, 30),
]


@pytest.mark.parametrize(("context", "active", "resident", "ring", "deficit", "split_layers", "stable", "mib", "calls"),
                         TRACE)
def test_the_published_trace(context: int, active: int, resident: int, ring: int, deficit: int, split_layers: int,
                             stable: int, mib: float, calls: int) -> None:
    policy = Policy.opened(POOL_CELLS, 16)
    assert (policy.resident, policy.ring, policy.ring_min) == (314, 17, 17)
    assert active == -(-(context + 256) // 256)
    _, split = policy.step(active, 1)
    assert (split.resident, split.ring) == (resident, ring)
    streamed = split.streamed(active)
    assert sum(streamed) == deficit and sum(pages > 0 for pages in streamed) == split_layers
    assert sum(streamed) - split_layers == stable and 2 * split_layers == calls
    assert stable * 425984 / 2**20 == pytest.approx(mib, abs=0.01)


def test_growing_token_by_token_follows_the_trace() -> None:
    """The state carried over a whole context ends where a new policy begins at that context."""
    policy = Policy.opened(POOL_CELLS, 16)
    seen = {}
    for active in range(250, 641):
        for _ in range(3):
            policy, split = policy.step(active, 1)
        seen[active] = (split.resident, split.ring)
    assert [seen[active] for _, active, *_ in TRACE] == [(resident, ring) for _, _, resident, ring, *_ in TRACE]


# --- layouts ----------------------------------------------------------------------------------------------------------


def test_split_layers_are_spread_evenly() -> None:
    _, split = Policy.opened(POOL_CELLS, 16).step(321, 1)
    streamed = split.streamed(321)
    assert streamed == (16, 0, 16, 0, 16, 0, 16, 0, 0, 16, 0, 16, 0, 16, 0, 0)


def test_a_prefill_streams_the_same_in_every_layer() -> None:
    _, split = Policy.opened(POOL_CELLS, 16).step(513, PREFILL)
    assert len(set(split.layer_pages)) == 1 and sum(split.layer_pages) + split.ring == POOL_CELLS


@pytest.mark.parametrize("width", [1, 2, 7, DECODE_TOKENS_MAX])
def test_a_verified_draft_is_decode(width: int) -> None:
    policy = Policy.opened(POOL_CELLS, 16)
    assert policy.step(513, width) == policy.step(513, 1)


def test_a_wide_step_is_not_decode() -> None:
    policy = Policy.opened(POOL_CELLS, 16)
    assert policy.step(513, DECODE_TOKENS_MAX + 1) == policy.step(513, PREFILL) != policy.step(513, 1)


def test_what_fits_has_no_ring() -> None:
    policy = Policy.opened(160, 16)
    assert policy.resident == 9
    after, split = policy.step(10, 1)
    assert split == Split(10, 0, (10,) * 16) and after.resident == 9
    _, split = policy.step(11, 1)
    assert 0 < split.ring and sum(split.streamed(11)) == 11 * 16 - sum(split.layer_pages) > 0


def test_no_pressure_forgets_what_was_counted() -> None:
    policy = policy_of(160, 16, 9, 16, starved=2, spare=5, layout_pages=12)
    after, split = policy.step(9, 1, LATE)
    assert (after.starved, after.spare, after.layout_pages, after.heard) == (0, 0, 0, LATE)
    assert split == Split(9, 16, (9,) * 16)


def test_a_long_prompt_that_is_there_at_once_has_its_ring_at_once() -> None:
    """Loaded or forked, in a new pool or after one in which everything had room; and the next step may decide anew."""
    fresh = Policy.opened(1260, 16)
    settled, _ = fresh.step(20, PREFILL)
    for policy in (fresh, settled):
        policy, split = policy.step(512, PREFILL)
        assert (split.resident, split.ring) == (policy.target(512), 1260 - 16 * policy.target(512))
        assert split.ring > 400 and not policy.cooldown and not policy.calm
        policy, split = policy.step(530, PREFILL)
        assert split.resident > policy.target(530), "after that as before, by what is heard"


@pytest.mark.parametrize("cells", range(1, 34))
def test_the_smallest_pools(cells: int) -> None:
    policy = Policy.opened(cells, 16)
    assert policy.ring >= 1 and policy.resident == (cells - min(8, max(0, cells - 16))) // 16 * (cells > 16)
    for tokens in (1, PREFILL):
        _, split = policy.step(100, tokens)
        assert split.ring >= 1 and sum(split.layer_pages) + split.ring == cells


# --- feedback ---------------------------------------------------------------------------------------------------------


def test_only_what_is_new_counts() -> None:
    policy = policy_of(160, 16, 9, 16, layout_pages=12)
    after, _ = policy.step(12, 1, LATE)
    assert after.starved == 1
    again, _ = after.step(12, 1, LATE)
    assert again == after
    more, _ = again.step(12, 1, evolve(LATE, samples=200))  # a hundred more, none of them late
    assert more.starved == 0 and more.heard.samples == 200


@pytest.mark.parametrize("nonsense", [Feedback(90, 12), Feedback(200, 5), Feedback(101, 90)])
def test_counters_that_cannot_be_true_are_a_new_beginning(nonsense: Feedback) -> None:
    policy = policy_of(160, 16, 9, 16, layout_pages=12, starved=2, heard=LATE)
    after, _ = policy.step(12, 1, nonsense)
    assert (after.starved, after.spare, after.resident, after.heard) == (0, 0, 9, nonsense)


def test_a_count_is_of_decisions_in_a_row() -> None:
    policy = policy_of(160, 16, 8, 32, layout_pages=12, starved=2, spare=7)
    after, _ = policy.step(12, 1, FINE)
    assert (after.starved, after.spare) == (0, 0)


def test_a_saturated_link_never_demotes_itself() -> None:
    policy = Policy.opened(POOL_CELLS, 16)
    for step in range(1, 3000):
        policy, split = policy.step(640, 1, Feedback(step * 10, step * 10, busy=0.95, peak=1.0))
    assert split.resident == 291


def test_lateness_costs_one_resident_page_and_no_more() -> None:
    policy = Policy.opened(POOL_CELLS, 16)
    for step in range(1, 3000):
        policy, split = policy.step(640, 1, Feedback(step * 10, step * 10, busy=0.5, peak=1.0))
    assert split.resident == 290


# --- a ring that is enough --------------------------------------------------------------------------------------------


def test_a_ring_need_not_hold_more_than_the_link_carries_meanwhile() -> None:
    policy, split = Policy.opened(POOL_CELLS, 16).step(640, 1)
    assert (split.resident, split.ring) == (291, 385)
    policy, split = policy.step(640, 1, Feedback(1, 0, busy=0.95, peak=1.0, lead=240))
    assert (split.resident, split.ring) == (299, 257) and policy.target(640) == 300
    for step in range(2, 500):  # what is measured is never quite the same
        late = Feedback(step, step - 1, busy=0.95, peak=1.0, lead=240 + step % 3 * 8)
        policy, split = policy.step(640, 1, late)
        assert split.resident == 299
    # As many layers stream as there are, each the same: a smaller ring does not hold a concentrated share.
    assert max(split.streamed(640)) - min(split.streamed(640)) <= 1


@pytest.mark.parametrize(("lead", "target"), [(0, 291), (1, 314), (17, 314), (18, 313), (385, 291), (386, 291),
                                              (9999, 291)])
def test_the_smaller_of_the_two_rings_is_enough(lead: int, target: int) -> None:
    policy = Policy.opened(POOL_CELLS, 16)
    assert evolve(policy, heard=Feedback(lead=lead)).target(640) == target


# --- every pool -------------------------------------------------------------------------------------------------------

POOLS = st.tuples(st.integers(1, 3000), st.integers(1, 80), st.sampled_from([0, 3, 10, 11, 25]))


@given(POOLS, st.integers(1, 2000), st.sampled_from([0, 1, 5, 50, 500, 5000]))
def test_the_target_is_the_largest_that_leaves_enough(pool: tuple[int, int, int], active: int, lead: int) -> None:
    policy = evolve(Policy.opened(*pool), heard=Feedback(lead=lead))
    cells, layers, tenths = pool
    allowed = [resident for resident in range(min(active, (cells - policy.ring_min) // layers) + 1)
               if 10 * (cells - resident * layers) >= tenths * (active - resident)
               or 0 < lead <= cells - resident * layers]
    assert policy.target(active) == max(allowed, default=0)


STEP = st.tuples(st.integers(1, 300), st.sampled_from([1, 4, PREFILL]),
                 st.none() | st.tuples(st.integers(0, 9), st.integers(0, 9), st.floats(0, 1), st.floats(0, 1),
                                          st.sampled_from([0, 0, 7, 60])))


@given(POOLS, st.lists(STEP, max_size=150))
def test_any_life_of_a_pool(pool: tuple[int, int, int], steps: list[Any]) -> None:
    """Every cell is accounted for, pages that stream have a ring to pass through, and apart from crossings into a new
    page, and the first step that streams again, a decision is left alone for a while."""
    policy = Policy.opened(*pool)
    cells, layers, _ = pool
    samples = misses = 0
    quiet = COOLDOWN
    for active, tokens, told in steps:
        feedback = None
        if told is not None:
            samples, misses = samples + max(told[:2]), misses + min(told[:2])
            feedback = Feedback(samples, misses, *told[2:])
        before, (policy, split) = policy, policy.step(active, tokens, feedback)
        assert sum(split.layer_pages) + split.ring == cells and min(split.layer_pages) >= 0 and split.ring >= 0
        streamed = split.streamed(active)
        if active > split.resident:
            assert split.ring >= policy.ring_min >= 1 and max(split.layer_pages) <= active
            assert sum(streamed) == (active - split.resident) * layers
        else:
            assert not any(streamed)
        if tokens == PREFILL or not any(streamed):
            assert len(set(split.layer_pages)) == 1
        else:
            shares = sorted(pages for pages in streamed if pages)
            assert shares[-1] - shares[0] <= 1, "split layers share alike"
            assert shares[-1] <= split.ring or len(shares) == layers, "a share beyond the ring, and layers to spare"
        again = before.calm and not policy.calm
        entered = again or (tokens != PREFILL and active != before.layout_pages)
        if policy.resident != before.resident and not entered and not policy.heard.lead:
            assert quiet >= COOLDOWN
        quiet = 0 if policy.resident != before.resident else quiet + 1
        if again and tokens == PREFILL:
            quiet = COOLDOWN


@given(POOLS, st.integers(1, 300), st.lists(st.tuples(st.booleans(), st.floats(0, 1), st.floats(0, 1)), min_size=200))
def test_a_context_that_stands_still_settles(pool: tuple[int, int, int], active: int, told: list[Any]) -> None:
    """Whatever the feedback: within one of the target, changed at most once in COOLDOWN steps."""
    policy = Policy.opened(*pool)
    target = policy.target(active)
    residents = []
    misses = 0
    for number, (late, busy, peak) in enumerate(told, 1):
        misses += late
        policy, split = policy.step(active, 1, Feedback(number, misses, busy, peak))
        residents.append(split.resident)
    if not any(split.streamed(active)):
        return
    assert {resident - target for resident in residents[1:]} <= {0, -1}
    changes = [place for place, (old, new) in enumerate(pairwise(residents)) if old != new]
    assert all(later - earlier >= COOLDOWN for earlier, later in pairwise(changes))


@given(st.integers(20, 3000), st.integers(1, 40))
def test_entering_a_page_moves_few_pages(cells: int, layers: int) -> None:
    """The reload that comes with every change of split where addresses follow from it is not there: from page to page
    of a growing context at most what the ring holds and a layer's share are fetched."""
    policy = Policy.opened(cells, layers)
    before: Split | None = None
    for active in range(max(1, policy.resident), policy.resident + 40):
        policy, split = policy.step(active, 1)
        if before is not None and before.layer_pages != split.layer_pages and min(before.ring, split.ring) > 0:
            fetched = sum(max(0, new - old) for old, new in
                          zip(before.layer_pages, split.layer_pages, strict=True))
            streamed = sum(split.streamed(active))
            assert fetched <= streamed + layers
        before = split
