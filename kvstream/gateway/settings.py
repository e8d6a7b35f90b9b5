"""What the parts of the gateway are told of a configuration. Plain functions; all wiring is in ``serve``."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import attrs

from ..adapters import ADAPTERS
from ..adapters.base import Adapter, CapacityQuery
from ..adapters.compat import Compat
from ..config import Config
from ..config_auth import client_keys, keys_file_warning
from ..core.scheduler import SchedulerSettings
from ..errors import ConfigError
from .access import AccessSettings, is_loopback
from .answer_cache import CacheBounds
from .coalesce import CoalesceSettings
from .embedded import EmbeddedSpec
from .engine import EngineSettings
from .flight import FlightBounds
from .hygiene import HygieneSettings
from .inject_settings import InjectSettings
from .media import MediaSettings
from .stream import StreamTimes
from .streamed import ProxySettings

# memory.dtype as llama.cpp spells it, where that differs
LLAMA_KV_TYPES: Mapping[str, str] = MappingProxyType({"float32": "f32", "bfloat16": "bf16"})


def proxy_settings(config: Config) -> ProxySettings:
    """What the model routes are told."""
    server, upstream, compat = config.server, config.upstream, config.compat
    return ProxySettings(
        keepalive_s=server.keepalive_s,
        keepalive_mode=compat.keepalive_mode,
        compat=Compat(tool_calls=compat.normalize_tool_calls, reasoning=compat.reasoning_field),
        body_bytes_max=server.body_bytes_max,
        body_gap_s=server.stall_s,
        answer_bytes_max=upstream.answer_bytes_max,
        forward_authorization=upstream.forward_authorization,
        media=MediaSettings(
            places=server.audio_max, wait_s_max=config.scheduler.max_wait_s, answer_s_max=upstream.first_event_s,
            body_bytes_max=server.body_bytes_max, body_gap_s=server.stall_s,
            answer_bytes_max=upstream.answer_bytes_max),
    )


def engine_settings(config: Config) -> EngineSettings:
    """What the engine is told of a configuration."""
    memory, upstream, prefix, server = config.memory, config.upstream, config.prefix_cache, config.server
    queue = config.scheduler
    scheduler = SchedulerSettings(
        order=queue.priority,
        seats_max=queue.max_batch_size,
        queue_max=queue.max_queue,
        queue_bytes_max=queue.max_queue_bytes,
        wait_s_max=queue.max_wait_s,
        ageing_s=queue.ageing_s,
        answer_tokens_default=queue.answer_tokens_default,
        backfill=queue.backfill,
        client_seats_max=queue.client_seats_max,
        long_prefills_max=queue.long_prefills_max,
        long_prefill_tokens=queue.long_prefill_tokens,
        leader_tokens=queue.leader_tokens,
        shed=queue.shed,
        shed_probe_every=queue.shed_probe_every,
        cold_after_s=queue.cold_after_s,
        exclusive_groups=queue.exclusive_models,
        switch_wait_s=queue.switch_wait_s,
        preemption=queue.preemption_policy,
        preemptions_max=queue.preemptions_max,
        answer_s_max=upstream.total_s,
        read_first_s=config.inject.read_first_s,
        save_tokens_min=config.inject.save_tokens_min,
        saved_bytes_max=config.inject.disk_bytes_max,
        watermark=memory.watermark,
        prefix_enabled=prefix.enabled,
        prefix_tokens_max=prefix.max_prefix_length,
        prefix_ttl_s=prefix.ttl_seconds,
    )
    return EngineSettings(
        scheduler=scheduler,
        query=CapacityQuery(
            page_tokens=memory.block_size,
            pages=None if memory.num_gpu_blocks == "auto" else memory.num_gpu_blocks,
            seats=config.backend.seats or None,
            context_tokens=config.backend.context_tokens or None,
            host_pages=memory.num_cpu_blocks,
        ),
        times=StreamTimes(
            first_event_s=upstream.first_event_s, gap_s=upstream.stall_s, total_s=upstream.total_s,
            stall_s=server.stall_s, answer_bytes_max=upstream.answer_bytes_max),
        buffer_bytes=server.stream_buffer_bytes,
        wait_s_max=queue.max_wait_s,
        load_timeout_s=upstream.load_timeout_s,
        health_interval_s=upstream.health_interval_s,
        slot_idle_poll_s=upstream.slot_idle_poll_s,
        slot_idle_s_max=upstream.slot_idle_s_max,
        wedged_s=upstream.wedged_s,
        busy_retry_s_max=upstream.busy_retry_s_max,
        down_grace_s=upstream.down_grace_s,
        breaker_faults=upstream.breaker_faults,
        breaker_open_s=upstream.breaker_open_s,
        count_timeout_s=upstream.count_timeout_s,
        include_usage=upstream.include_usage,
        passthrough=upstream.non_stream == "pass",
        tokens_keyed_max=prefix.max_prefix_length if prefix.enabled else 0,
        inject=inject_settings(config) if config.inject.mode != "off" else None,
        hygiene=HygieneSettings(config.prefix.volatile, config.prefix.normalize, config.prefix.diagnose),
    )


def inject_settings(config: Config) -> InjectSettings:
    """What hard inject is told."""
    inject = config.inject
    return InjectSettings(
        dir=str(Path(inject.dir).expanduser()) if inject.dir else "",
        state_dir=config.embedded.state_dir, disk_bytes_max=inject.disk_bytes_max,
        files_max=inject.files_max, slow_save_s=inject.slow_save_s, misses_max=inject.misses_max,
        drain_save_s=inject.drain_save_s)


def coalesce_settings(config: Config) -> CoalesceSettings:
    """Which requests share a call, and what is kept of answers."""
    cache = config.response_cache
    return CoalesceSettings(
        enabled=config.coalesce.enabled,
        twins=config.upstream.non_stream == "assemble",
        bounds=FlightBounds(config.server.stream_buffer_bytes, config.coalesce.history_bytes_max),
        cache=CacheBounds(cache.entries_max if cache.enabled else 0, cache.bytes_max, cache.ttl_s))


def access_settings(config: Config) -> AccessSettings:
    """Who may come in. Reads ``auth.keys_file``. *Errors*: ``ConfigError``."""
    return AccessSettings(
        keys=client_keys(config.auth), metrics_token=config.auth.metrics_token, origins=config.server.cors_origins,
        loopback=is_loopback(config.server.host), public_metrics=config.server.public_metrics)


def access_warnings(config: Config) -> list[str]:
    """What an operator should know about who may come in, for the log at start."""
    found = [keys_file_warning(config.auth)]
    if not is_loopback(config.server.host) and not config.auth.enabled:
        found.append(f"server.host = {config.server.host} can be reached from other machines, and there are no [auth] "
                     "keys: whoever reaches it may use it")
    return [text for text in found if text]


def make_adapter(config: Config, base_url: str) -> Adapter:
    """The adapter of ``backend.type`` for ``base_url``. *Errors*: ``ConfigError`` without an address."""
    backend = config.backend
    if not base_url:
        raise ConfigError(f"backend.base_url: a backend of type {backend.type} needs one (or --backend-url URL)")
    options: dict[str, Any] = {
        "base_url": base_url, "model": backend.model, "api_key": backend.api_key,
        "event_bytes_max": config.upstream.event_bytes_max,
    }
    if backend.type == "llamacpp" and backend.kv != "auto":
        options["kv_unified"] = backend.kv == "unified"
    if backend.type == "ollama":
        options["group_by_load_key"] = backend.group_by_load_key
    adapter: Adapter = ADAPTERS[backend.type](**options)
    return adapter


def embedded_spec(config: Config) -> EmbeddedSpec:
    """What the supervisor is told of a configuration."""
    names = [a.name for a in attrs.fields(EmbeddedSpec) if hasattr(config.embedded, a.name)]
    values = {name: getattr(config.embedded, name) for name in names}
    values["state_dir"] = config.embedded.state_dir or None
    values["slot_bytes_max"] = config.inject.disk_bytes_max
    if config.memory.dtype != "float16":  # llama.cpp's own default
        kv_type = LLAMA_KV_TYPES.get(config.memory.dtype, config.memory.dtype)
        values["extra_args"] = ("-ctk", kv_type, "-ctv", kv_type, *config.embedded.extra_args)
    return EmbeddedSpec(**values)
