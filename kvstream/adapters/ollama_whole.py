"""Ollama's embeddings: one JSON object, as it came for a native client, as OpenAI's for one of ``/v1``."""

from __future__ import annotations

import base64
import json
import struct
from collections.abc import Mapping
from typing import Any

from .base import Delta, Done, Failed, Finished, ProxyRequest, UpstreamEvent, Usage, UsageNumbers
from .chunks import as_count
from .framing import EVENT_BYTES_MAX
from .ollama_request import EMBEDDINGS
from .whole import HeldBody


class EmbeddingDecoder(HeldBody):
    """The whole answer is one delta: ``raw`` is what the client gets."""

    def __init__(self, request: ProxyRequest, bytes_max: int = EVENT_BYTES_MAX) -> None:
        super().__init__(bytes_max)
        self._translated = request.route == EMBEDDINGS
        self._model = request.model
        self._packed = request.view.get("encoding_format") == "base64"

    def events(self, text: bytes, data: Any) -> list[UpstreamEvent]:
        if not isinstance(data, dict) or not ({"embedding", "embeddings"} & set(data)):
            kind = "backend_protocol" if data is not None else "upstream_stream_truncated"
            return [Failed(kind, "the backend answered 200 with a body that holds no embeddings", 502)]
        prompt = as_count(data.get("prompt_eval_count"))
        if self._translated:
            data = self._openai(data, prompt)
            text = json.dumps(data, separators=(",", ":")).encode()
        usage: list[UpstreamEvent] = [Usage(b"", UsageNumbers(prompt, 0))] if prompt else []
        return [Delta(text, data), Finished("stop"), *usage, Done(b"")]

    def _openai(self, data: Mapping[str, Any], prompt: int) -> dict[str, Any]:
        rows = data.get("embeddings")
        listed = [
            {"object": "embedding", "embedding": self._vector(row), "index": index}
            for index, row in enumerate(rows if isinstance(rows, list) else ())
        ]
        usage = {"prompt_tokens": prompt, "total_tokens": prompt}
        return {"object": "list", "data": listed, "model": data.get("model", self._model), "usage": usage}

    def _vector(self, row: Any) -> Any:
        """The numbers, or their little-endian 32-bit floats in base64, which OpenAI's own client asks for."""
        if not self._packed or not isinstance(row, list):
            return row
        try:
            return base64.b64encode(struct.pack(f"<{len(row)}f", *row)).decode("ascii")
        except (struct.error, OverflowError):
            return row
