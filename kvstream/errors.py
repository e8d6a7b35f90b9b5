"""Every error KVStream raises on purpose, in one tree.

::

    KVStreamError                      an expected failure; carries what an HTTP client and a person need
    ├─ ConfigError                     the configuration is wrong; the process does not start (exit code 2)
    ├─ PortInUseError                  the address is taken (exit code 3)
    ├─ EmbeddedError                   the llama.cpp child cannot be started or kept alive
    ├─ StoreError                      a file of saved KV cannot be written, kept or offered; requests go on without
    ├─ DeviceError                     the CUDA device, its driver or its kernels cannot be used, or failed
    │  ├─ DeviceMemoryError            the device or pinned memory has no room for that
    │  └─ StepError                    a step of the KV streamer asked for something that cannot be; nothing changed
    ├─ RequestError                    the client's fault: 4xx
    │  ├─ InvalidRequestError          400  malformed body, wrong type of a field
    │  ├─ ContextLengthError           400  can never fit; names both numbers
    │  ├─ UnauthorizedError            401  no key, or one that opens nothing here
    │  ├─ ForbiddenHostError           403  Host header of another site (DNS rebinding)
    │  ├─ ForbiddenError               403  not for this client, or for nobody on this address
    │  ├─ ModelNotFoundError           404
    │  ├─ RouteNotFoundError           404
    │  ├─ RouteUnsupportedError        404  we know the route, the backend does not serve it
    │  ├─ MethodNotAllowedError        405
    │  ├─ BodyTooLargeError            413
    │  ├─ MediaTypeError               415  a body in a coding we do not know
    │  └─ UpstreamRejectedError        4xx  the runtime refused this very request
    ├─ OverloadError                   503 (429 for the queue bounds), always with Retry-After
    │  ├─ QueueFullError               429
    │  ├─ RateLimitedError             429  this key asked more often than it may
    │  ├─ QueueTimeoutError            503  waited as long as allowed
    │  ├─ PredictedWaitError           503  would wait longer than allowed, so it is told at once
    │  ├─ BackendLoadingError          503  the model is still being loaded
    │  └─ ShuttingDownError            503  draining
    ├─ BackendError                    the runtime's fault: 502, 503 or 504
    │  ├─ BackendUnavailableError      503  reset before the first byte, no route
    │  │  └─ BackendRefusedError       503  nobody listens there
    │  ├─ BackendTimeoutError          504  connect, first event or stall
    │  │  └─ TotalTimeoutError         504  the answer took longer than the operator allows
    │  ├─ BackendWedgedError           504  it answers its health route, and computes nothing
    │  ├─ LoopError                    508  the backend is this KVStream itself
    │  ├─ BackendAuthError             502  the runtime wants a key that we do not have
    │  ├─ BackendProtocolError         502  an answer that is not what its API promises
    │  ├─ StreamTruncatedError         502  the stream ended before it was finished
    │  └─ UpstreamFailedError          5xx  the runtime said so itself
    └─ StreamAbortedError              our own end of a stream
       ├─ ReaderStalledError           the client stopped reading
       └─ PoolExhaustedError           no page left for the growing answer

Foreign exceptions (httpx, h11, json, OS) are translated into these at named borders, with ``raise ... from``.
"""

from __future__ import annotations

from typing import Any, ClassVar


class KVStreamError(Exception):
    """An expected failure.

    ``message`` is one or two sentences that say what happened and what to do. ``status`` is the HTTP status,
    ``code`` and ``type`` are the OpenAI error fields, ``param`` names the offending field when there is one,
    ``retry_after_s`` (seconds) becomes ``Retry-After``.
    """

    status: ClassVar[int] = 500
    code: ClassVar[str] = "internal_error"
    type: ClassVar[str] = "api_error"

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        retry_after_s: float | None = None,
        status: int | None = None,
        code: str | None = None,
        type: str | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.retry_after_s = retry_after_s
        if status is not None:
            self.status = status  # type: ignore[misc]
        if code is not None:
            self.code = code  # type: ignore[misc]
        if type is not None:
            self.type = type  # type: ignore[misc]

    def envelope(self) -> dict[str, Any]:
        """The body every OpenAI client can read: ``{"error": {message, type, code, param}}``."""
        return {"error": {"message": self.message, "type": self.type, "code": self.code, "param": self.param}}


class ConfigError(KVStreamError):
    """The configuration is wrong. ``problems`` lists every fault found, each with its path."""

    code = "config_error"

    def __init__(self, problems: list[str] | str) -> None:
        self.problems = [problems] if isinstance(problems, str) else problems
        super().__init__("\n".join(self.problems))


class PortInUseError(KVStreamError):
    code = "port_in_use"


class EmbeddedError(KVStreamError):
    code = "embedded_backend"


class StoreError(KVStreamError):
    """Saved KV. No client ever sees it: what was to be restored is computed."""

    code = "kv_store"


class DeviceError(KVStreamError):
    """The CUDA device, its driver or its kernels. After a failed launch or copy the device can only be closed."""

    status = 503
    code = "device_error"


class DeviceMemoryError(DeviceError):
    """No room on the device or in pinned memory. Names what was asked for."""

    code = "device_memory"


class StepError(DeviceError):
    """A call of the KV streamer that makes no sense now. What was there before is still there."""

    code = "kv_step"


class RequestError(KVStreamError):
    status = 400
    code = "invalid_request"
    type = "invalid_request_error"


class InvalidRequestError(RequestError):
    pass


class ContextLengthError(RequestError):
    code = "context_length_exceeded"


class UnauthorizedError(RequestError):
    status = 401
    code = "invalid_api_key"
    type = "authentication_error"


class ForbiddenError(RequestError):
    status = 403
    code = "forbidden"
    type = "permission_error"


class ForbiddenHostError(RequestError):
    status = 403
    code = "host_not_allowed"
    type = "permission_error"


class ModelNotFoundError(RequestError):
    status = 404
    code = "model_not_found"
    type = "not_found_error"


class RouteNotFoundError(RequestError):
    status = 404
    code = "route_not_found"
    type = "not_found_error"


class RouteUnsupportedError(RequestError):
    """404 and not 501: the official clients try a 5xx again, and no retry can help here."""

    status = 404
    code = "route_not_supported"
    type = "not_found_error"


class MethodNotAllowedError(RequestError):
    status = 405
    code = "method_not_allowed"


class BodyTooLargeError(RequestError):
    status = 413
    code = "body_too_large"


class MediaTypeError(RequestError):
    status = 415
    code = "unsupported_media_type"


class UpstreamRejectedError(RequestError):
    code = "upstream_rejected"


class OverloadError(KVStreamError):
    status = 503
    code = "overloaded"
    type = "overloaded_error"


class QueueFullError(OverloadError):
    status = 429
    code = "queue_full"


class RateLimitedError(OverloadError):
    status = 429
    code = "rate_limit_exceeded"
    type = "rate_limit_error"


class QueueTimeoutError(OverloadError):
    code = "queue_timeout"


class PredictedWaitError(OverloadError):
    code = "predicted_wait"


class BackendLoadingError(OverloadError):
    code = "model_loading"


class ShuttingDownError(OverloadError):
    code = "shutting_down"


class BackendError(KVStreamError):
    status = 502
    code = "backend_error"
    type = "upstream_error"


class BackendUnavailableError(BackendError):
    status = 503
    code = "backend_unavailable"


class BackendRefusedError(BackendUnavailableError):
    pass


class BackendTimeoutError(BackendError):
    status = 504
    code = "backend_timeout"


class TotalTimeoutError(BackendTimeoutError):
    pass


class BackendWedgedError(BackendError):
    status = 504
    code = "backend_wedged"


class LoopError(BackendError):
    status = 508
    code = "loop_detected"


class BackendAuthError(BackendError):
    code = "backend_auth"


class BackendProtocolError(BackendError):
    code = "backend_protocol"


class StreamTruncatedError(BackendError):
    code = "upstream_stream_truncated"


class UpstreamFailedError(BackendError):
    code = "upstream_error"


class StreamAbortedError(KVStreamError):
    code = "stream_aborted"


class ReaderStalledError(StreamAbortedError):
    code = "reader_stalled"


class PoolExhaustedError(StreamAbortedError):
    code = "kv_pool_exhausted"
