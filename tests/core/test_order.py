"""Who goes first: classes, ageing, shortest job first, fairness between clients. Bounds in time, on a one-seat lane
whose every service takes one second unless said otherwise."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from hypothesis import given
from hypothesis import settings as given_few
from hypothesis import strategies as st

from kvstream.core import messages as m
from kvstream.core.policy import handicap_s, predicted_work
from kvstream.core.queue import WaitingQueue
from kvstream.core.state import Waiting
from tests.play import Play, ended, produced, submit


def serve(play: Play, arrivals: Callable[[int], Iterable[m.Submitted]], seconds: int) -> dict[int, int]:
    """One service a second; returns when each request was admitted."""
    admitted: dict[int, int] = {}
    for now in range(seconds):
        events: list[m.Event] = [ended(rid) for rid in play.running]
        actions = play.at(float(now)).step(*events, *arrivals(now), expect=None)
        admitted |= {action.rid: now for action in actions if isinstance(action, m.Admit)}
    return admitted


def test_the_order_of_arrival_is_kept() -> None:
    play = Play(seats=1)
    admitted = serve(play, lambda now: [submit(i, 16) for i in range(20)] if now == 0 else [], 20)
    assert list(admitted) == list(range(20))


def test_one_high_passes_a_hundred_low() -> None:
    """Case 37."""
    play = Play(seats=1)
    play.step(submit(0, 16), expect=["admit 0"])
    play.at(1).step(*(submit(i, 16, priority="low") for i in range(1, 101)))
    play.at(2).step(submit(101, 16, priority="high"), submit(102, 16, priority="normal"))
    play.step(ended(0), expect=["admit 101"])
    play.step(ended(101), expect=["admit 102"])
    play.step(ended(102), expect=["admit 1"])


def test_a_low_one_under_endless_high_is_served_in_time() -> None:
    play = Play(seats=1, ageing_s=30, wait_s_max=120)

    def arrivals(now: int) -> list[m.Submitted]:
        first = [submit(1, 16, priority="low"), submit(2, 16, priority="normal")] if now == 0 else []
        return [*first, *(submit(1000 * k + now, 16, priority="high") for k in range(1, 6))]

    admitted = serve(play, arrivals, 120)
    assert 30 <= admitted[2] <= 31
    assert 60 <= admitted[1] <= 61


def test_short_jobs_first_but_a_long_one_is_served_in_time() -> None:
    play = Play(seats=1, order="sjf", ageing_s=30, pages=1000)

    def arrivals(now: int) -> list[m.Submitted]:
        first = [submit(1, 8000, 4000)] if now == 1 else []
        return [*first, submit(1000 + now, 16, 8), submit(5000 + now, 16, 8)]

    admitted = serve(play, arrivals, 120)
    assert 20 < admitted[1] <= 62


def test_sjf_sorts_by_predicted_work() -> None:
    play = Play(seats=1, order="sjf", pages=1000)
    play.step(submit(0, 16), expect=["admit 0"])
    play.step(submit(1, 16, 500), submit(2, 5000, 100), submit(3, 16, 100), submit(4, 16, None))
    for last, best in ((0, 4), (4, 3), (3, 1), (1, 2)):
        play.step(ended(last), expect=[f"admit {best}"])


def test_sjf_knows_what_is_cached() -> None:
    play = Play(seats=1, order="sjf", pages=1000)
    play.step(submit(0, 4000, 16, prompt="a"), expect=["admit 0"])
    play.step(ended(0), submit(1, 16), expect=["admit 1"])
    play.step(submit(2, 1000, 16), submit(3, 4001, 16, prompt="a"))
    play.step(ended(1), expect=["admit 3 cached=4000"])


def test_a_flooding_client_does_not_hold_up_a_polite_one() -> None:
    """Case 37: at most two service times, however large the flood and however old."""
    play = Play(seats=1)

    def arrivals(now: int) -> list[m.Submitted]:
        flood = [submit(i, 16, client="flood") for i in range(1000)] if now == 0 else []
        return flood + ([submit(5000 + now, 16, client="polite")] if now % 5 == 1 else [])

    admitted = serve(play, arrivals, 60)
    waits = [when - (rid - 5000) for rid, when in admitted.items() if rid >= 5000]
    assert len(waits) == 12
    assert max(waits) <= 2
    assert [rid for rid in admitted if rid < 1000] == list(range(60 - 12))


def test_two_floods_share_evenly() -> None:
    play = Play(seats=1)
    floods = [submit(i, 16, client="ab"[i >= 100]) for i in range(200)]
    admitted = serve(play, lambda now: floods if now == 0 else [], 40)
    assert abs(sum(rid < 100 for rid in admitted) - 20) <= 1


def test_a_flood_of_low_ones_is_not_passed_by_endless_new_clients_for_ever() -> None:
    play = Play(seats=1, ageing_s=10)

    def arrivals(now: int) -> list[m.Submitted]:
        flood = [submit(i, 16, client="flood", priority="low") for i in range(3)] if now == 0 else []
        return [*flood, submit(1000 + now, 16, client=f"new-{now}", priority="high")]

    admitted = serve(play, arrivals, 90)
    assert admitted[0] <= 21
    assert admitted[1] - admitted[0] <= 21
    assert admitted[2] - admitted[1] <= 21


def test_positions_are_the_order_of_service() -> None:
    play = Play(seats=1)
    play.step(submit(0, 16, client="a"), expect=["admit 0"])
    play.at(1).step(*(submit(i, 16, client="abc"[i % 3], priority=["low", "normal"][i % 2]) for i in range(1, 13)))
    foreseen = play.waiting
    served = []
    while play.running:
        play.now += 0.001
        play.step(*(ended(rid) for rid in play.running), expect=None)
        served += play.running
    assert served == foreseen


def test_recounting_keeps_the_place_in_the_queue() -> None:
    play = Play(seats=1)
    play.step(submit(0, 16), submit(1, 16), submit(2, 16), expect=["admit 0"])
    play.at(1).step(m.Recounted(play.see().waiting[0].rid, (), 40))
    assert play.waiting == [1, 2]


@given(st.floats(0, 1e9), st.floats(0, 1e9))
def test_more_work_waits_longer_but_never_longer_than_ageing(a: float, b: float) -> None:
    short, long = sorted((a, b))
    assert 0 <= handicap_s(short, 1024, 30) <= handicap_s(long, 1024, 30) <= 30


def test_predicted_work_counts_prefill_less() -> None:
    assert predicted_work(1000, 100, 0.1) == 200


# --- weights ----------------------------------------------------------------------------------------------------------


def turns(weights: dict[str, float], seconds: int, **settings: float) -> dict[str, int]:
    """How many of the first ``seconds`` services each client gets while all of them have plenty waiting."""
    play = Play(seats=1, ageing_s=30, wait_s_max=1e6, queue_max=10_000, **settings)  # type: ignore[arg-type]
    each, clients, counts = seconds + 2, list(weights), dict.fromkeys(weights, 0)
    events: list[m.Event] = [submit(n * each + i, 16, client=client, weight=weight)
                             for n, (client, weight) in enumerate(weights.items()) for i in range(each)]
    for now in range(seconds):
        for action in play.scheduler.step(float(now), events):
            assert isinstance(action, m.Admit)
            counts[clients[action.rid // each]] += 1
            events = [ended(action.rid)]
    play.scheduler.check_invariants()
    return counts


@given_few(max_examples=15)
@given(st.lists(st.sampled_from([0.5, 1.0, 1.5, 2.0, 3.0, 5.0, 10.0]), min_size=2, max_size=5))
def test_weight_w_means_w_times_the_turns(weights: list[float]) -> None:
    counts = turns({str(n): weight for n, weight in enumerate(weights)}, 300)
    for n, weight in enumerate(weights):
        due = 300 * weight / sum(weights)
        # The round that was not finished, and the fraction that a client's turn is rounded up by.
        assert abs(counts[str(n)] - due) <= weight / min(weights) + 2


def test_weight_one_for_all_is_round_robin() -> None:
    for weight in (1.0, 0.3, 7.0):
        counts = turns(dict.fromkeys("abc", weight), 30)
        assert all(abs(count - 10) <= 1 for count in counts.values())


def test_absurd_weights_are_bounded() -> None:
    for weight in (0.01, 0.0, -1.0, float("nan"), 1e-300):
        assert turns({"heavy": 1.0, "light": weight}, 500)["light"] >= 3, weight
    assert turns({"heavy": float("inf"), "light": 1.0}, 500)["light"] >= 3


def test_a_heavy_client_of_a_low_class_does_not_starve_the_others() -> None:
    """Ageing lifts its head, not its whole share."""
    play = Play(seats=1, ageing_s=10, wait_s_max=1e6)
    low = [submit(i, 16, client="heavy", weight=100, priority="low") for i in range(200)]
    low += [submit(200 + i, 16, client="light", priority="low") for i in range(5)]

    def arrivals(now: int) -> list[m.Submitted]:
        return [*(low if now == 0 else []), submit(1000 + now, 16, client="h", priority="high")]

    admitted = serve(play, arrivals, 150)
    waits = [at - (rid - 1000) for rid, at in admitted.items() if rid >= 1000]
    assert len(waits) >= 100 and sum(1 for rid in admitted if rid < 200) >= 5


def test_a_grant_is_known_in_every_section_also_when_the_turn_is_not_over() -> None:
    """Found by the simulation: the turn stayed, so the other section's ageing did too."""
    play = Play(seats=2, pages=1000, long_prefill_tokens=100, leader_tokens=0)
    play.step(submit(0, 500, client="z"), expect=["admit 0"])
    play.step(submit(1, 500, client="a", weight=3), submit(2, 50, client="a", weight=3),
              submit(3, 50, client="b"), expect=["admit 2"])
    play.at(1).step(submit(4, 50, client="a", weight=3))
    play.at(2).step(ended(2), expect=["admit 3"])
    play.at(3).step(ended(3), expect=["admit 4"])


def test_a_weight_is_kept_over_sections() -> None:
    """A client whose long prompt is put aside has one turn, not one for each place where it waits."""
    play = Play(seats=1, pages=1000, long_prefill_tokens=100, leader_tokens=0)
    play.step(submit(0, 500, client="z"), expect=["admit 0"])
    play.step(*(submit(i, 500 if i % 2 else 50, client="a") for i in range(1, 9)),
              *(submit(i, 500 if i % 2 else 50, client="b") for i in range(11, 19)))
    order = []
    for now in range(1, 17):
        (rid,) = play.running
        play.at(now).step(produced(rid), ended(rid), expect=None)
        order += play.running
    assert ["ab"[rid > 10] for rid in order] == ["a", "b"] * 8
    assert [rid for rid in order if rid < 10] == list(range(1, 9))


def test_ageing_of_a_heavy_client_begins_anew_with_each_grant_also_behind_a_gate() -> None:
    """It keeps its turn for the rest of its round, and so its place; but it has not waited since before its grant."""
    play = Play(seats=2, pages=1000, long_prefill_tokens=100, leader_tokens=0, ageing_s=10)
    play.step(submit(0, 500, client="z"), submit(1, 50, client="z"), expect=["admit 0", "admit 1"])
    heavy = {"client": "a", "weight": 3.0, "priority": "low"}
    play.step(submit(2, 50, **heavy), submit(3, 500, **heavy), submit(4, 50, **heavy), submit(5, 50, client="b"),
              submit(6, 50, client="b", priority="low"))
    play.at(1).step(ended(1), expect=["admit 5"])
    for now, (over, admitted) in enumerate([(5, 2), (2, 4)], 9):  # the check of the books is the test
        play.at(now).step(ended(over), expect=[f"admit {admitted}"])


def test_one_that_comes_back_may_meet_its_first_life_among_the_deadlines() -> None:
    """A preempted request is put back with the number and the deadline that it had: the two cannot be compared."""
    queue = WaitingQueue(30.0)
    for _ in range(3):
        queue.add(Waiting.of(submit(1, 16), 0.0, 5.0, 7))
        queue.remove(submit(1, 16).rid)
    queue.add(Waiting.of(submit(2, 16), 0.0, 6.0, 8))
    assert [waiting.rid for waiting in queue.expired(6.0)] == [2]
