"""What the bodies of each form say: whether they make sense, which text is the prompt, how many places they take. Pure.

A form is a row of ``FORMS``; ``adapters.routes`` says which path has which. Images and audio are never taken for text:
their base64 is none, and its size says nothing about tokens.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from attrs import frozen

from ..adapters.routes import route_of
from ..errors import InvalidRequestError

BYTES_PER_TOKEN = 3  # of documents that stand beside the longest one: on the safe side of the usual four


@frozen
class Form:
    """How one form of body is read. ``check`` raises ``InvalidRequestError``; ``text`` is the prompt in one string, for
    estimating and for splitting it into stable pieces; ``seats`` is how many slots of the runtime it takes at once."""

    check: Callable[[Mapping[str, Any]], None]
    text: Callable[[Mapping[str, Any]], str]
    seats: Callable[[Mapping[str, Any]], int] = lambda view: 1
    beside: Callable[[Mapping[str, Any]], int] = lambda view: 0  # tokens of other documents that run side by side


# --- what must be there -----------------------------------------------------------------------------------------------


def need(view: Mapping[str, Any], name: str, kinds: tuple[type, ...], words: str) -> Any:
    """The field, or an ``InvalidRequestError`` that says what it must be."""
    value = view.get(name)
    if not isinstance(value, kinds) or isinstance(value, bool):
        raise InvalidRequestError(f"{name!r} must be {words}", param=name)
    return value


def _check_messages(view: Mapping[str, Any]) -> None:
    messages = need(view, "messages", (list,), "a list of messages")
    if not messages:
        raise InvalidRequestError("'messages' must have at least one message", param="messages")
    for index, message in enumerate(messages):
        if not isinstance(message, dict):
            raise InvalidRequestError(f"messages[{index}] must be an object", param=f"messages[{index}]")


def _check_prompt(view: Mapping[str, Any]) -> None:
    if not isinstance(view.get("prompt", ""), (str, list)):
        raise InvalidRequestError("'prompt' must be a string or a list", param="prompt")


def _check_native(view: Mapping[str, Any]) -> None:
    need(view, "prompt", (str, list, dict), "a string, a list or an object")


def _check_responses(view: Mapping[str, Any]) -> None:
    for index, item in enumerate(need(view, "input", (str, list), "a string or a list of items")):
        if not isinstance(item, (str, dict)):
            raise InvalidRequestError(f"input[{index}] must be an object", param=f"input[{index}]")


def _check_infill(view: Mapping[str, Any]) -> None:
    for name in ("input_prefix", "input_suffix"):
        need(view, name, (str,), "a string")


def _check_rerank(view: Mapping[str, Any]) -> None:
    need(view, "query", (str,), "a string")
    need(view, "documents" if "documents" in view else "texts", (list,), "a list")


def _check_embeddings(view: Mapping[str, Any]) -> None:
    need(view, "input" if "input" in view or "content" not in view else "content", (str, list, dict),
         "a string or a list")


def _check_ollama_chat(view: Mapping[str, Any]) -> None:
    """No messages at all ask Ollama to load the model."""
    messages = view.get("messages")
    if messages is not None and not (isinstance(messages, list) and all(isinstance(m, dict) for m in messages)):
        raise InvalidRequestError("'messages' must be a list of objects", param="messages")
    _check_options(view)


def _check_options(view: Mapping[str, Any]) -> None:
    options = view.get("options")
    if options is not None and not isinstance(options, dict):
        raise InvalidRequestError("'options' must be an object", param="options")
    limit = (options or {}).get("num_predict")
    whole = isinstance(limit, int) or (isinstance(limit, float) and limit.is_integer())
    if limit is not None and (isinstance(limit, bool) or not whole):
        raise InvalidRequestError("'options.num_predict' must be an integer", param="options.num_predict")


# --- the text ---------------------------------------------------------------------------------------------------------


def texts_in(value: Any) -> list[str]:
    """The text of a content: a string, or the text parts of a list of parts, also of tool results inside it."""
    if isinstance(value, str):
        return [value]
    found: list[str] = []
    for part in value if isinstance(value, list) else ():
        if isinstance(part, str):
            found.append(part)
        elif isinstance(part, dict):
            for name in ("text", "thinking"):
                if isinstance(part.get(name), str):
                    found.append(part[name])
            if isinstance(part.get("input"), dict):  # a tool that was called
                found.append(json.dumps(part["input"], sort_keys=True))
            if "content" in part:
                found += texts_in(part["content"])
    return found


def _dialogue(view: Mapping[str, Any]) -> str:
    """Chat and messages. Tools come first, as templates put them; then the system prompt, then turn by turn."""
    parts = [json.dumps(view["tools"], sort_keys=True)] if view.get("tools") else []
    parts += texts_in(view.get("system"))
    messages = view.get("messages")
    for message in messages if isinstance(messages, list) else ():
        parts.append(f"\n{message.get('role', '')}\n")
        parts += texts_in(message.get("content"))
        if message.get("tool_calls"):
            parts.append(json.dumps(message["tool_calls"], sort_keys=True))
    return "".join(parts)


def _response_items(view: Mapping[str, Any]) -> str:
    parts = [json.dumps(view["tools"], sort_keys=True)] if view.get("tools") else []
    parts += texts_in(view.get("instructions"))
    items = view.get("input")
    if isinstance(items, str):
        return "".join([*parts, "\nuser\n", items])
    for item in items if isinstance(items, list) else ():
        if not isinstance(item, dict):
            continue
        parts.append(f"\n{item.get('role') or item.get('type') or ''}\n")
        parts += texts_in(item.get("content"))
        for name in ("name", "arguments", "output"):
            parts += texts_in(item.get(name))
    return "".join(parts)


def _prompt(view: Mapping[str, Any]) -> str:
    prompt = view.get("prompt", "")
    if isinstance(prompt, Mapping):  # llama.cpp's form for text with media
        prompt = prompt.get("prompt_string", "")
    return "\n".join(texts_in(prompt))


def _infill(view: Mapping[str, Any]) -> str:
    extra = view.get("input_extra")
    chunks = [part.get("text") for part in extra if isinstance(part, dict)] if isinstance(extra, list) else []
    fields = [view.get(name) for name in ("input_prefix", "prompt", "input_suffix")]
    return "\n".join(text for text in [*chunks, *fields] if isinstance(text, str))


def _ollama_generate(view: Mapping[str, Any]) -> str:
    return "\n".join(view[name] for name in ("system", "prompt", "suffix") if isinstance(view.get(name), str))


def _ollama_input(view: Mapping[str, Any]) -> str:
    """The longest of the texts to embed; Ollama reads them one after the other."""
    return max(texts_in(view.get("input", view.get("prompt"))), key=len, default="")


def turns_of(path: str, view: Mapping[str, Any]) -> int:
    """How many turns a chat template wraps."""
    turns = view.get("input" if route_of(path).form == "responses" else "messages")
    return len(turns) if isinstance(turns, list) else 0


# --- several at once --------------------------------------------------------------------------------------------------


def choices(view: Mapping[str, Any]) -> int:
    """Every choice (``n``) runs in a slot of its own."""
    return max(1, int(view.get("n") or 1))


def _prompts(view: Mapping[str, Any]) -> int:
    """Every choice of every prompt of a list."""
    prompt = view.get("prompt")
    several = isinstance(prompt, list) and bool(prompt) and all(isinstance(item, (str, list)) for item in prompt)
    return choices(view) * (len(prompt) if several and isinstance(prompt, list) else 1)


def _documents(view: Mapping[str, Any]) -> list[str]:
    """What an embeddings call reads, one entry a document; token ids stand as so many blanks as they weigh."""
    given = view.get("input") if "input" in view else view.get("content")
    if isinstance(given, Mapping):
        given = given.get("prompt_string", "")
    if not isinstance(given, list):
        return [given] if isinstance(given, str) else [""]
    if given and all(type(item) is int for item in given):
        return ["    " * len(given)]
    return ["    " * len(item) if isinstance(item, list) else "".join(texts_in([item])) for item in given]


def _ranked(view: Mapping[str, Any]) -> list[str]:
    documents = view.get("documents", view.get("texts"))
    query = view.get("query", "")
    return [f"{query}\n{''.join(texts_in([document]))}" for document in documents or ()]


def _longest(documents: Callable[[Mapping[str, Any]], list[str]]) -> Callable[[Mapping[str, Any]], str]:
    return lambda view: max(documents(view), key=len, default="")


def _beside(documents: Callable[[Mapping[str, Any]], list[str]]) -> Callable[[Mapping[str, Any]], int]:
    """llama.cpp makes a task of every document; each needs a slot of its own and no document sees another."""

    def tokens(view: Mapping[str, Any]) -> int:
        sizes = sorted(len(document.encode("utf-8", "surrogatepass")) for document in documents(view))
        return sum(size // BYTES_PER_TOKEN + 1 for size in sizes[:-1])

    return tokens


_EMBEDDINGS = Form(_check_embeddings, _longest(_documents), lambda view: len(_documents(view)), _beside(_documents))

FORMS: Mapping[str, Form] = MappingProxyType({
    "chat": Form(_check_messages, _dialogue, choices),
    "messages": Form(_check_messages, _dialogue, choices),  # llama.cpp heeds `n` here too
    "responses": Form(_check_responses, _response_items, choices),
    "completions": Form(_check_prompt, _prompt, _prompts),
    "native": Form(_check_native, _prompt, _prompts),
    "infill": Form(_check_infill, _infill),
    "embeddings": _EMBEDDINGS,
    "native_embeddings": _EMBEDDINGS,
    "rerank": Form(_check_rerank, _longest(_ranked), lambda view: len(_ranked(view)), _beside(_ranked)),
    "ollama_chat": Form(_check_ollama_chat, _dialogue),
    "ollama_generate": Form(_check_options, _ollama_generate),
    "ollama_embed": Form(_check_options, _ollama_input),
    "tokens": Form(lambda view: None, lambda view: ""),
})
"""The forms by name. ``audio`` has none: its body is not read."""
