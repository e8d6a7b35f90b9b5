"""How answers look on the wire, by the path they were asked on: the frames that are KVStream's own.

The runtime's frames travel byte for byte and need nobody who understands them. But some are ours: errors, keepalives,
token counts that a client asked for and its runtime did not send, and the end of an answer that we had to cut. Each API
has its own form for those, and a client of one chokes on another's.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Protocol

from ..adapters.routes import ROUTES
from ..errors import KVStreamError
from .dialect_anthropic import AnthropicDialect
from .dialect_llamacpp import LlamaCppDialect
from .dialect_ollama import OllamaDialect
from .dialect_openai import OpenAIDialect
from .dialect_responses import ResponsesDialect
from .ports import Answer


class Dialect(Protocol):
    """The form of one API. All frames are complete, with the empty line (or line end) that ends them."""

    media_type: bytes
    """``Content-Type`` of a streamed answer."""

    @property
    def ping(self) -> bytes:
        """Proof of life for a client that waits; nothing that changes its answer. Empty where there is none."""
        ...

    @property
    def keeps_whole(self) -> bool:
        """Whether ``length_frames`` has to repeat what was answered, so that somebody must keep it."""
        ...

    def empty_delta(self, answer: Answer) -> bytes:
        """Proof of life that a client takes for an event of its answer, where there is such a thing; else a ping."""
        ...

    def envelope(self, error: KVStreamError, request_id: str = "") -> dict[str, Any]:
        """The body of an HTTP error."""
        ...

    def error_frame(self, error: KVStreamError) -> bytes:
        """An error after the answer began."""
        ...

    def usage_frame(self, answer: Answer) -> bytes:
        """Token counts that the client asked for and the runtime did not send."""
        ...

    def length_frames(self, answer: Answer, whole: dict[str, Any] | None) -> bytes:
        """The end of a stream that we had to cut, as if it had reached a token limit. ``whole`` is the answer so far,
        given where ``keeps_whole``."""
        ...

    def completed(self, whole: dict[str, Any], answer: Answer) -> dict[str, Any]:
        """An assembled answer, with what its stream could not bring: estimated usage, or the end that we gave it."""
        ...


DIALECTS: Mapping[str, Dialect] = MappingProxyType({
    "openai": OpenAIDialect(),
    "anthropic": AnthropicDialect(),
    "responses": ResponsesDialect(),
    "llamacpp": LlamaCppDialect(),
    "ollama": OllamaDialect(),
})
"""The dialects by the name that ``adapters.routes`` gives them."""

_BY_PREFIX = (("/v1/messages", "anthropic"), ("/api/", "ollama"))


def dialect_of(path: str) -> Dialect:
    """The dialect that a client of ``path`` speaks, also where nothing is served."""
    route = ROUTES.get(path)
    if route is not None:
        return DIALECTS[route.dialect]
    return DIALECTS[next((name for prefix, name in _BY_PREFIX if path.startswith(prefix)), "openai")]
