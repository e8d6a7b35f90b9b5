"""What an engine is told."""

from __future__ import annotations

from attrs import field, frozen

from ..adapters.base import CapacityQuery
from ..core.scheduler import SchedulerSettings
from .hygiene import HygieneSettings
from .inject_settings import InjectSettings
from .stream import StreamTimes


@frozen
class EngineSettings:
    """All an engine is told. Times in seconds; see ``kvstream.toml`` for the keys they come from."""

    scheduler: SchedulerSettings
    query: CapacityQuery
    times: StreamTimes = field(factory=StreamTimes)
    buffer_bytes: int = 1024 * 1024
    wait_s_max: float = 120.0
    load_timeout_s: float = 600.0
    health_interval_s: float = 2.0
    slot_idle_poll_s: float = 0.05
    slot_idle_s_max: float = 30.0
    count_timeout_s: float = 5.0
    include_usage: bool = True
    passthrough: bool = False
    tokens_keyed_max: int = 2048
    breaker_faults: int = 5
    breaker_open_s: float = 5.0
    hygiene: HygieneSettings = field(factory=HygieneSettings)
    wedged_s: float = 90.0
    busy_retry_s_max: float = 30.0
    down_grace_s: float = 10.0
    inject: InjectSettings | None = None  # None: slots are the runtime's own affair
    raise_bugs: bool = False
