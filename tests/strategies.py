"""Hypothesis strategies for the values of the core, small enough that things collide."""

from __future__ import annotations

from hypothesis import strategies as st

from kvstream.core import messages as m
from kvstream.core.types import EndReason, Limits, PageKey, PoolMode, RequestId
from tests.play import submit

PAGE = 16

prompts = st.text("abc", min_size=1, max_size=5)
"""Names for ``tests.play.keys_of``: prompts of one prefix share its pages."""

modes = st.sampled_from(PoolMode)
# One that gives way comes back: see test_preempt.py.
reasons = st.sampled_from([reason for reason in EndReason if reason is not EndReason.PREEMPTED])
groups = st.sampled_from(["", "x", "y"])
rids = st.integers(0, 30).map(RequestId)


@st.composite
def colliding_keys(draw: st.DrawFn) -> tuple[PageKey, ...]:
    """A path of keys with so few digests that different contents share one."""
    return tuple(
        PageKey(bytes([draw(st.integers(0, 1))]), bytes([draw(st.integers(0, 2))]))
        for _ in range(draw(st.integers(0, 5)))
    )


@st.composite
def backends(draw: st.DrawFn) -> Limits:
    mode = draw(modes)
    cap = draw(st.none() | st.integers(40, 400))
    return Limits(
        mode,
        seats=draw(st.integers(1, 5)),
        pages=draw(st.integers(3, 40)),
        page_tokens=PAGE,
        request_tokens_max=cap,
        shares_prefix=draw(st.booleans()),
    )


@st.composite
def submissions(draw: st.DrawFn, rid: int, now: float) -> m.Submitted:
    return submit(
        rid,
        draw(st.integers(0, 200)),
        draw(st.none() | st.integers(0, 80)),
        prompt=draw(prompts),
        priority=draw(st.sampled_from(["high", "normal", "low"])),
        client=draw(st.sampled_from(["", "a", "b"])),
        deadline=now + draw(st.floats(-1, 60)),
        size=draw(st.integers(0, 60)),
        weight=draw(st.sampled_from([1.0, 0.5, 3.0])),
        group=draw(groups),
        seats=draw(st.sampled_from([1, 1, 1, 2, 6])),
    )
