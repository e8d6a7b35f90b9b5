"""What Ollama tells of its models and their KV memory: ``/api/tags``, ``/api/ps`` and ``/api/show``.

Ollama decides the context by model and by request (``num_ctx``), and tells it only of models that are loaded. How many
requests it runs at once (``OLLAMA_NUM_PARALLEL``) and in which type it keeps KV (``OLLAMA_KV_CACHE_TYPE``) it does not
tell at all.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from attrs import frozen

from .base import HttpReply
from .chunks import as_count

F16_BYTES = 2
LAYERS_MAX = 4096  # no model has as many; a bound on what somebody else's JSON makes us add up


@frozen
class Loaded:
    """A model in Ollama's memory. ``context`` is in tokens, 0 when it is not told (before 0.11)."""

    name: str
    context: int
    vram_bytes: int
    digest: str


def full_name(model: str) -> str:
    """The name with its tag: Ollama takes ``x`` for ``x:latest``."""
    return model if not model or ":" in model.rpartition("/")[2] else f"{model}:latest"


def rows_of(reply: HttpReply | None) -> list[dict[str, Any]]:
    """``models`` of ``/api/tags`` or ``/api/ps``; empty when the reply is none."""
    data = reply.json() if reply is not None and reply.status == 200 else None
    rows = data.get("models") if isinstance(data, dict) else None
    return [row for row in rows if isinstance(row, dict)] if isinstance(rows, list) else []


def name_of(row: Mapping[str, Any]) -> str:
    for key in ("model", "name"):
        value = row.get(key)
        if isinstance(value, str) and value:
            return value
    return ""


def loaded_of(reply: HttpReply | None) -> list[Loaded]:
    """The models in memory, by name."""
    found = [
        Loaded(
            name_of(row), as_count(row.get("context_length")), _big(row.get("size_vram")), str(row.get("digest", ""))
        )
        for row in rows_of(reply)
        if name_of(row)
    ]
    return sorted(found, key=lambda model: model.name)


def fingerprint(models: list[Loaded]) -> str:
    """Another text as soon as another model, or the same with another context, is in memory: then what was cached is
    gone. Empty when nothing is loaded."""
    return " ".join(f"{model.name}@{model.context}@{model.digest[:12]}" for model in models)


def openai_models(reply: HttpReply | None) -> dict[str, Any] | None:
    """``/api/tags`` in the shape of OpenAI's model list; None when it cannot be read. The alias is the short name that
    Ollama takes as well."""
    data = reply.json() if reply is not None and reply.status == 200 else None
    if not isinstance(data, dict) or not isinstance(data.get("models"), list):
        return None
    listed = []
    for row in rows_of(reply):
        name = name_of(row)
        if not name:
            continue
        entry: dict[str, Any] = {"id": name, "object": "model", "created": 0, "owned_by": "library"}
        if name.endswith(":latest"):
            entry["aliases"] = [name.removesuffix(":latest")]
        if isinstance(row.get("details"), Mapping):
            entry["details"] = row["details"]
        listed.append(entry)
    return {"object": "list", "data": listed}


# --- geometry ---------------------------------------------------------------------------------------------------------


@frozen
class Geometry:
    """The KV memory of one model. ``bytes_per_token`` is for f16, over all layers; ``windowed`` says that some layers
    keep a window only, so that the figure is an upper bound. ``trained`` is the longest context of its training."""

    layers: int
    bytes_per_token: int
    windowed: bool
    trained: int


def geometry_of(reply: HttpReply | None) -> Geometry | None:
    """From ``/api/show``; None when it does not tell, as when per-layer figures came as ``[]`` (ask ``verbose``)."""
    info = _model_info(reply)
    arch = info.get("general.architecture")
    if not isinstance(arch, str):
        return None
    layers = as_count(info.get(f"{arch}.block_count"))
    heads = _per_layer(info.get(f"{arch}.attention.head_count"), layers)
    told = info.get(f"{arch}.attention.head_count_kv")
    heads_kv = heads if told is None else _per_layer(told, layers)
    default = as_count(info.get(f"{arch}.embedding_length")) // max(*heads, 1) if heads else 0
    key = as_count(info.get(f"{arch}.attention.key_length")) or default
    value = as_count(info.get(f"{arch}.attention.value_length")) or default
    if not 0 < layers <= LAYERS_MAX or not heads_kv or not key or not value:
        return None
    windowed = f"{arch}.attention.sliding_window" in info
    size = sum(heads_kv) * (key + value) * F16_BYTES
    return Geometry(layers, size, windowed, as_count(info.get(f"{arch}.context_length")))


def needs_verbose(reply: HttpReply | None) -> bool:
    """Whether figures per layer were withheld: arrays of more than five come as ``[]`` unless asked for verbosely."""
    info = _model_info(reply)
    return any(key.endswith((".head_count_kv", ".head_count")) and value == [] for key, value in info.items())


def geometry_note(model: Loaded, shape: Geometry, seats: int) -> str:
    """The figures in words, for the operator."""
    bound = "at most " if shape.windowed else ""
    total = shape.bytes_per_token * model.context * seats
    return (
        f"{model.name}: {shape.layers} layers, {bound}{shape.bytes_per_token} bytes of KV per token in f16; "
        f"{seats} x {model.context} tokens take {bound}{total / 2**20:.0f} MiB (its training allows {shape.trained})"
    )


def _model_info(reply: HttpReply | None) -> Mapping[str, Any]:
    data = reply.json() if reply is not None and reply.status == 200 else None
    info = data.get("model_info") if isinstance(data, dict) else None
    return info if isinstance(info, Mapping) else {}


def _per_layer(value: Any, layers: int) -> list[int]:
    """A figure per layer: one number for all of them, or an array."""
    if isinstance(value, list):
        return [as_count(item) for item in value[:LAYERS_MAX]]
    count = as_count(value)
    return [count] * min(layers, LAYERS_MAX) if count else []


def _big(value: Any) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 < value < 2**63 else 0


def pairs_of(models: list[Loaded]) -> Iterator[str]:
    """``name with N tokens`` of every loaded model."""
    for model in models:
        yield f"{model.name} with {model.context or 'unknown'} tokens"
