"""OpenAI requests as requests of Ollama's own API.

Only what the client gave travels, under Ollama's name for it; no option is added or changed. What Ollama cannot do and
would change the answer is a refusal (:class:`Unsupported`), never silence. What its own ``/v1`` routes accept and leave
aside (``tool_choice`` that forces, ``user``, ``store``, ``metadata`` ...) is left aside here as well, so that a client
that worked with Ollama works the same through KVStream.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from .chunks import parse_json

CHAT, COMPLETIONS, EMBEDDINGS = "/v1/chat/completions", "/v1/completions", "/v1/embeddings"
NATIVE_OF: Mapping[str, str] = MappingProxyType(
    {CHAT: "/api/chat", COMPLETIONS: "/api/generate", EMBEDDINGS: "/api/embed"}
)
"""Which native route serves a translated one."""

EFFORTS: Mapping[str, Any] = MappingProxyType({"none": False, "low": "low", "medium": "medium", "high": "high"})

# The options that OpenAI's API and Ollama's call by the same name, and those that clients of local runtimes send along.
_OPTIONS = ("temperature", "top_p", "seed", "frequency_penalty", "presence_penalty", "top_k", "min_p", "repeat_penalty")
# Fields of a chat or completion that ask for another answer than Ollama can give.
_REFUSED: Mapping[str, str] = MappingProxyType(
    {
        "logprobs": "log probabilities",
        "top_logprobs": "log probabilities",
        "echo": "echo",
        "logit_bias": "a logit bias",
        "audio": "spoken answers",
        "functions": "the old field 'functions' (use 'tools')",
        "function_call": "the old field 'function_call' (use 'tools')",
        "web_search_options": "web search",
    }
)


class Unsupported(ValueError):
    """What Ollama cannot do, in words for the client. ``OllamaBackend.refusal`` says it before anything is sent."""


def translated(route: str, view: Mapping[str, Any], model: str) -> dict[str, Any]:
    """The body for ``NATIVE_OF[route]``, without ``stream``. *Errors*: ``Unsupported``."""
    body: dict[str, Any] = {}
    name = view.get("model") or model
    if name:
        body["model"] = name
    if route == EMBEDDINGS:
        return body | _embedding(view)
    _refuse(view)
    body |= _chat(view) if route == CHAT else _completion(view)
    options = _options(view)
    if options:
        body["options"] = options
    form = _format(view.get("response_format"))
    if form is not None:
        body["format"] = form
    effort = view.get("reasoning_effort")
    if effort is not None:
        if not isinstance(effort, str) or effort not in EFFORTS:
            raise Unsupported(f"reasoning_effort must be one of {', '.join(EFFORTS)} with Ollama, not {_short(effort)}")
        body["think"] = EFFORTS[effort]
    return body


def _refuse(view: Mapping[str, Any]) -> None:
    for field in ("n", "best_of"):
        if isinstance(view.get(field), (int, float)) and view[field] > 1:
            raise Unsupported(f"Ollama answers once per request; '{field}' must be 1, not {_short(view[field])}")
    for field, what in _REFUSED.items():
        value = view.get(field)
        if value is not None and value is not False and value != {} and value != []:
            raise Unsupported(f"Ollama does not give {what}; leave '{field}' out")


def _options(view: Mapping[str, Any]) -> dict[str, Any]:
    options = {key: view[key] for key in _OPTIONS if view.get(key) is not None}
    limit = view.get("max_completion_tokens")
    limit = view.get("max_tokens") if limit is None else limit
    if limit is not None:
        options["num_predict"] = limit
    stop = view.get("stop")
    if stop is not None:
        options["stop"] = [stop] if isinstance(stop, str) else stop
    return options


def _format(wanted: Any) -> Any:
    """Ollama's ``format`` for OpenAI's ``response_format``; None for plain text."""
    if wanted is None:
        return None
    kind = wanted.get("type") if isinstance(wanted, Mapping) else None
    if kind == "text":
        return None
    if kind == "json_object":
        return "json"
    if kind == "json_schema":
        holder = wanted.get("json_schema")
        schema = holder.get("schema") if isinstance(holder, Mapping) else None
        if isinstance(schema, Mapping):
            return schema
        raise Unsupported("response_format: 'json_schema.schema' must be an object")
    raise Unsupported(f"response_format must be of type text, json_object or json_schema, not {_short(kind)}")


def _completion(view: Mapping[str, Any]) -> dict[str, Any]:
    prompt = view.get("prompt", "")
    if isinstance(prompt, list) and len(prompt) == 1:
        prompt = prompt[0]
    if not isinstance(prompt, str):
        raise Unsupported("Ollama takes one prompt, a string: no list of prompts and no token ids")
    suffix = view.get("suffix")
    return {"prompt": prompt} if suffix is None else {"prompt": prompt, "suffix": suffix}


def _embedding(view: Mapping[str, Any]) -> dict[str, Any]:
    given = view.get("input")
    texts = given if isinstance(given, list) else [given]
    if not texts or not all(isinstance(text, str) for text in texts):
        raise Unsupported("Ollama embeds a string or a list of strings; token ids are not supported")
    if view.get("encoding_format") not in (None, "float", "base64"):
        raise Unsupported(f"encoding_format must be float or base64, not {_short(view['encoding_format'])}")
    dimensions = view.get("dimensions")
    return {"input": given} if dimensions is None else {"input": given, "dimensions": dimensions}


# --- chat -------------------------------------------------------------------------------------------------------------


def _chat(view: Mapping[str, Any]) -> dict[str, Any]:
    names: dict[str, str] = {}  # of the tools called so far, by the id of the call
    messages = view.get("messages")
    body: dict[str, Any] = {
        "messages": [
            _message(message, names, f"messages[{place}]")
            for place, message in enumerate(messages if isinstance(messages, list) else ())
        ]
    }
    if view.get("tools") and view.get("tool_choice") != "none":
        body["tools"] = view["tools"]
    return body


def _message(message: Any, names: dict[str, str], where: str) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise Unsupported(f"{where} must be an object")
    role = message.get("role", "user")
    text, images = _content(message.get("content"), where)
    made: dict[str, Any] = {"role": "system" if role == "developer" else role, "content": text}
    if images:
        made["images"] = images
    thought = message.get("reasoning") or message.get("reasoning_content")
    if isinstance(thought, str):
        made["thinking"] = thought
    calls = message.get("tool_calls")
    if isinstance(calls, list) and calls:
        made["tool_calls"] = [_call(call, names, f"{where}.tool_calls[{place}]") for place, call in enumerate(calls)]
    if role == "tool":
        call_id = message.get("tool_call_id")
        name = message.get("name") or names.get(call_id if isinstance(call_id, str) else "")
        made |= {"tool_name": name} if name else {}
        made |= {"tool_call_id": call_id} if isinstance(call_id, str) else {}
    return made


def _call(call: Any, names: dict[str, str], where: str) -> dict[str, Any]:
    """A tool call of the dialogue so far: OpenAI writes the arguments as a text, Ollama as an object."""
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping):
        raise Unsupported(f"{where}.function must be an object")
    given = function.get("arguments")
    arguments = parse_json(given.encode("utf-8", "surrogatepass")) if isinstance(given, str) and given else given or {}
    if not isinstance(arguments, Mapping):
        raise Unsupported(f"{where}.function.arguments must be a JSON object in a string")
    made: dict[str, Any] = {"function": {"name": function.get("name", ""), "arguments": arguments}}
    call_id = call.get("id")
    if isinstance(call_id, str) and call_id:
        made["id"] = call_id
        names[call_id] = str(function.get("name", ""))
    return made


def _content(content: Any, where: str) -> tuple[str, list[str]]:
    """(text, images) of a message. Ollama's ``/v1`` makes a message of every part, which changes the prompt that the
    model sees and with it every shared prefix; here the parts of one message stay one message."""
    if content is None:
        return "", []
    if isinstance(content, str):
        return content, []
    if not isinstance(content, list):
        raise Unsupported(f"{where}.content must be a string or a list of parts")
    texts: list[str] = []
    images: list[str] = []
    for place, part in enumerate(content):
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind in ("text", "refusal") and isinstance(part.get(kind), str):
            texts.append(part[kind])
        elif kind == "image_url":
            images.append(_image(part.get("image_url"), f"{where}.content[{place}]"))
        else:
            raise Unsupported(f"{where}.content[{place}]: Ollama takes text and images, not {_short(kind)}")
    return "\n".join(texts), images


def _image(given: Any, where: str) -> str:
    """The base64 of a ``data:`` URL. KVStream fetches nothing from the network for a client."""
    url = given.get("url") if isinstance(given, Mapping) else given
    head, comma, data = url.partition(",") if isinstance(url, str) else ("", "", "")
    if not (head.startswith("data:") and head.endswith(";base64") and comma and data):
        raise Unsupported(f"{where}: an image must be a data: URL with base64; Ollama does not fetch addresses")
    return data


def _short(value: Any) -> str:
    return json.dumps(value)[:40]
