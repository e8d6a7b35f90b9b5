"""What an operator decides about the scheduling of one lane; every bound has a name and a unit."""

from __future__ import annotations

from typing import Literal

from attrs import field, frozen
from attrs.validators import ge, gt, in_, lt


@frozen(kw_only=True)
class SchedulerSettings:
    """``seats_max`` requests run at once, if the backend has that many seats. Counts unless a unit is in the name.

    * ``queue_max``, ``queue_bytes_max``: newcomers beyond these are refused at once; ``wait_s_max`` bounds every wait,
      also where the request's own deadline is later.
    * ``ageing_s``: the wait that makes up for one priority class (0: classes do not count), and the most that ``sjf``
      lets a short request gain on a long one. ``sjf_half_work`` is the work that costs half of it.
    * ``answer_tokens_default``: the answer to reserve for a request that set no limit.
    * ``watermark``: fraction of the pages that admission leaves free for growth.
    * ``prefill_weight``: work of one uncached prompt token, with an answer token as 1 (prefill is batched, decode not).
    * ``backfill_candidates_max``: how many requests behind a blocked head one step looks at.
    * ``client_seats_max``: seats that one client may have at a time (0: all).
    * ``long_prefills_max``: how many prompts of more than ``long_prefill_tokens`` uncached tokens are read at a time
      (0: no bound). ``leader_tokens``: the length from which a shared prefix is worth waiting for (0: never).
    * ``shed``: refuse at once who would wait past its deadline, except every ``shed_probe_every``-th.
    * ``cold_groups``: of a group that is not loaded one request goes alone; it is taken to be unloaded after
      ``cold_after_s`` without a request.
    * ``exclusive_groups``: only one group is served at a time; others wait at most ``switch_wait_s`` before it gets no
      more.
    * ``read_first_s``: a cold prompt that takes longer than this to compute is read before its answer is begun, so that
      it can be handed on. ``save_tokens_min``: fewer tokens are not worth a file; ``saved_bytes_max`` bounds all files.
    * ``preemption``: how a request of a lower class gives way to one that finds no place: its KV is saved, or computed
      again, or it does not. At most ``preemptions_max`` times; ``answer_s_max`` after its first admission it ends, also
      while it waits (0: no bound).
    """

    order: Literal["fcfs", "sjf"] = field(default="fcfs", validator=in_(("fcfs", "sjf")))
    seats_max: int = field(default=16, validator=ge(1))
    queue_max: int = field(default=1000, validator=ge(0))
    queue_bytes_max: int = field(default=256 * 1024 * 1024, validator=ge(0))
    wait_s_max: float = field(default=120.0, validator=gt(0))
    ageing_s: float = field(default=30.0, validator=ge(0))
    answer_tokens_default: int = field(default=512, validator=ge(1))
    backfill: bool = True
    watermark: float = field(default=0.02, validator=[ge(0), lt(1)])
    prefix_enabled: bool = True
    prefix_tokens_max: int = field(default=32_768, validator=ge(0))
    prefix_ttl_s: float = field(default=3600.0, validator=gt(0))
    prefill_weight: float = field(default=0.1, validator=ge(0))
    sjf_half_work: float = field(default=1024.0, validator=gt(0))
    backfill_candidates_max: int = field(default=32, validator=ge(0))
    service_window_s: float = field(default=60.0, validator=gt(0))
    expiries_per_step_max: int = field(default=512, validator=ge(1))
    waiting_shown_max: int = field(default=100, validator=ge(0))
    client_seats_max: int = field(default=0, validator=ge(0))
    long_prefills_max: int = field(default=1, validator=ge(0))
    long_prefill_tokens: int = field(default=1024, validator=ge(0))
    leader_tokens: int = field(default=512, validator=ge(0))
    shed: bool = True
    shed_probe_every: int = field(default=16, validator=ge(1))
    cold_groups: bool = False
    cold_after_s: float = field(default=300.0, validator=gt(0))
    exclusive_groups: bool = False
    switch_wait_s: float = field(default=10.0, validator=ge(0))
    read_first_s: float = field(default=0.5, validator=ge(0))
    save_tokens_min: int = field(default=256, validator=ge(1))
    saved_bytes_max: int = field(default=8 * 2**30, validator=ge(0))
    preemption: Literal["swap", "recompute", "off"] = field(
        default="swap", validator=in_(("swap", "recompute", "off")))
    preemptions_max: int = field(default=3, validator=ge(0))
    answer_s_max: float = field(default=0.0, validator=ge(0))
