"""What must be equal for llama.cpp's saved KV to mean the same in another process.

A slot's file names neither model nor layout. Restored into another geometry it is refused, but into *other weights of
the same geometry* (a finetune, another LoRA) it is taken, and the answers are silently wrong. So everything that shapes
KV and can be seen from outside goes into a digest, and a file of another digest is never offered.

The weights themselves cannot be seen through HTTP, only by the size and time of the model's file. Where the shell
cannot see that file (a server on another machine), the identity holds for one process: ``/props`` shows a text that
every process draws anew.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import Any

from .base import HttpCall, HttpReply
from .llamacpp_state import Props
from .slot_calls import Identity

DIGEST_HEX = 16
_META = ("vocab_type", "n_vocab", "n_ctx_train", "n_embd", "n_params", "size", "ftype")


def identity_calls(replies: Mapping[str, HttpReply | None], *, props: HttpCall, lora: HttpCall, models: HttpCall,
                   plain: HttpCall | None) -> Sequence[tuple[str, HttpCall]]:
    """The next calls. A sleeping server is asked for ``/props`` only: its LoRA list would wake it. ``plain`` is
    ``/props`` without a model, which tells a router; None where no model is named, so that ``props`` is that."""
    if "props" not in replies:
        return (("props", props),)
    found = Props.read(replies["props"])
    if found is None or found.sleeping or "lora" in replies:
        return ()
    return (("lora", lora), ("models", models), *((("plain", plain),) if plain is not None else ()))


def read_identity(replies: Mapping[str, HttpReply | None], files: Mapping[str, str], model: str) -> Identity | None:
    """None while the server does not tell, or sleeps. ``files`` may have any facts in words; all of them count."""
    props = Props.read(replies.get("props"))
    if props is None or props.sleeping or replies.get("lora") is None:
        return None
    meta = _meta_of(replies.get("models"), model)
    if meta is None:
        return None
    told = _object(replies.get("props"))
    facts = {
        "model_path": _text(told.get("model_path")),
        "build": props.build,
        "context": str(props.context),
        "slots": str(props.slots),
        "lora": _lora(replies.get("lora")),
        "template": _digest(_text(told.get("chat_template"))),
        **{name: _text(meta.get(name)) for name in _META},
        **{f"file {name}": value for name, value in files.items()},
    }
    if not files:
        facts["process"] = props.process
    facts = {name: value for name, value in sorted(facts.items()) if value}
    plain = _object(replies.get("plain"))
    return Identity(_digest(json.dumps(facts)), facts, props.context, props.slots, router=plain.get("role") == "router")


def model_path(reply: HttpReply | None) -> str:
    """Where the server says that its model's file is, from ``/props``; empty when it does not."""
    return _text(_object(reply).get("model_path"))


def _digest(text: str) -> str:
    return blake2b(text.encode("utf-8", "surrogatepass"), digest_size=DIGEST_HEX // 2).hexdigest()


def _object(reply: HttpReply | None) -> Mapping[str, Any]:
    data = reply.json() if reply is not None and reply.status == 200 else None
    return data if isinstance(data, dict) else {}


def _text(value: Any) -> str:
    return value if isinstance(value, str) else "" if value is None else json.dumps(value, sort_keys=True)


def _meta_of(reply: HttpReply | None, model: str) -> Mapping[str, Any] | None:
    """What ``/v1/models`` tells of our model, or of its only one; None while it does not (null during loading)."""
    rows = _object(reply).get("data")
    rows = [row for row in rows if isinstance(row, dict)] if isinstance(rows, list) else []
    named = [row for row in rows if model and (row.get("id") == model or model in _names(row.get("aliases")))]
    found = named or (rows if len(rows) == 1 else [])
    meta = found[0].get("meta") if found else None
    return meta if isinstance(meta, dict) else None


def _names(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _lora(reply: HttpReply | None) -> str:
    """The adapters and their scales. A server that does not know the question has none that could be changed."""
    data = reply.json() if reply is not None and reply.status == 200 else None
    if not isinstance(data, list):
        return "not told"
    rows = [row for row in data if isinstance(row, dict)]
    return json.dumps([[row.get(name) for name in ("id", "path", "scale")] for row in rows]) if rows else "none"
