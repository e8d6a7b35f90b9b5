"""From what adapters and the scheduler report to the error tree: one table, one place."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from ..adapters.base import Failed
from ..core.messages import Refuse
from ..core.types import RefuseReason
from ..errors import (
    BackendAuthError,
    BackendLoadingError,
    BackendProtocolError,
    BackendUnavailableError,
    ContextLengthError,
    InvalidRequestError,
    KVStreamError,
    ModelNotFoundError,
    OverloadError,
    PredictedWaitError,
    QueueFullError,
    QueueTimeoutError,
    RouteUnsupportedError,
    ShuttingDownError,
    StreamTruncatedError,
    UpstreamFailedError,
    UpstreamRejectedError,
)

_KINDS: Mapping[str, type[KVStreamError]] = MappingProxyType({
    error.code: error
    for error in (
        ContextLengthError, InvalidRequestError, ModelNotFoundError, RouteUnsupportedError, UpstreamRejectedError,
        BackendLoadingError,
        OverloadError, BackendUnavailableError, BackendAuthError, BackendProtocolError, StreamTruncatedError,
        UpstreamFailedError,
    )
})


def error_of(failed: Failed) -> KVStreamError:
    """The exception for an adapter's ``Failed``. A refusal of this very request keeps the runtime's status."""
    kind = _KINDS.get(failed.kind, UpstreamFailedError)
    retry = failed.retry_after_s
    if retry is None and (issubclass(kind, OverloadError) or kind is BackendUnavailableError):
        retry = 2.0
    if kind is UpstreamRejectedError and 400 <= failed.status < 500:
        return kind(failed.message, status=failed.status)
    return kind(failed.message, retry_after_s=retry)


def error_of_refusal(refuse: Refuse, *, wait_s_max: float) -> KVStreamError:
    """The exception for a ``Refuse`` action."""
    retry = refuse.retry_after_s if refuse.retry_after_s is not None else 5.0
    match refuse.why:
        case RefuseReason.TOO_LONG:
            return ContextLengthError(
                f"this request's prompt has {refuse.tokens} tokens, but the backend's context holds {refuse.limit}; "
                "shorten the prompt or start the backend with a larger context",
            )
        case RefuseReason.QUEUE_FULL:
            return QueueFullError("the queue is full (scheduler.max_queue); try again later", retry_after_s=retry)
        case RefuseReason.QUEUE_BYTES:
            return QueueFullError(
                "the queue holds as many bytes as it may (scheduler.max_queue_bytes); try again later",
                retry_after_s=retry)
        case RefuseReason.TIMEOUT:
            return QueueTimeoutError(
                f"no seat became free within scheduler.max_wait_s = {wait_s_max:g} s; try again later",
                retry_after_s=retry)
        case RefuseReason.SHED:
            return PredictedWaitError(
                f"at the present rate no seat becomes free within scheduler.max_wait_s = {wait_s_max:g} s; "
                "try again later", retry_after_s=retry)
        case RefuseReason.CLOSING:
            return ShuttingDownError("the gateway is shutting down", retry_after_s=retry)
        case RefuseReason.BACKEND_DOWN:
            return BackendUnavailableError("the backend is not reachable", retry_after_s=retry)
    raise AssertionError(refuse.why)
