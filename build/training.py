"""What the Python of a release is trained with: gcc lays out its code by how often each branch was taken here.

    python3.11 build/training.py

build/bullseye.sh runs it between the two compilations of Python. It does what KVStream makes Python do, with the
standard library alone. First a start: code is unmarshalled and run, classes are made, patterns and generated methods
are compiled. Then serving: coroutines take turns, and frames of JSON are split, read and written.

It must count the same each time, or a release could not be built again to the same bytes: so it has one thread, asks
neither the clock nor a socket nor chance, and is run with a fixed hash seed and fixed addresses (``setarch -R``).
"""

import builtins
import importlib
import json
import marshal
import re
import types
from collections import deque
from pathlib import Path

STARTS = 12
STREAMS = 16
TOKENS = 1000
MODULES = (
    "abc", "argparse", "ast", "asyncio.base_events", "asyncio.events", "asyncio.futures", "asyncio.locks",
    "asyncio.queues", "asyncio.streams", "asyncio.tasks", "base64", "bisect", "calendar", "codecs", "collections",
    "collections.abc", "concurrent.futures.thread", "configparser", "contextlib", "contextvars", "copy", "csv",
    "dataclasses", "datetime", "dis", "email.feedparser", "email.header", "email.message", "email.policy",
    "email.utils", "enum", "fractions", "functools", "gettext", "glob", "hashlib", "heapq", "hmac", "html.parser",
    "http.client", "http.cookiejar", "http.cookies", "http.server", "importlib._bootstrap_external",
    "importlib.metadata", "inspect", "ipaddress", "json.decoder", "json.encoder", "linecache", "locale", "logging",
    "logging.config", "logging.handlers", "mimetypes", "numbers", "opcode", "operator", "optparse", "pathlib",
    "pickle", "pprint", "queue", "quopri", "random", "re._compiler", "re._parser", "sched", "selectors", "shlex",
    "shutil", "socketserver", "stat", "statistics", "string", "struct", "subprocess", "tempfile", "textwrap",
    "threading", "tokenize", "tomllib._parser", "traceback", "types", "typing", "urllib.parse", "urllib.request",
    "uuid", "warnings", "weakref", "xml.etree.ElementTree", "zipfile",
)
METHOD = """
def __init__(self, name, limit=attr_dict['limit'].default, *, parts=NOTHING):
    _setattr = _cached_setattr_get(self)
    _setattr('name', name)
    _setattr('limit', limit)
    if parts is not NOTHING:
        _setattr('parts', __converter_parts(parts))
    else:
        _setattr('parts', __attr_factory_parts())

def __eq__(self, other):
    if other.__class__ is not self.__class__:
        return NotImplemented
    return (
        self.name == other.name
        and self.limit == other.limit
        and self.parts == other.parts
    )

def __hash__(self):
    return hash((%d, self.name, self.limit, self.parts))
"""
FIELD = re.compile(rb"^(data|event|id):[ ]?(.*)$")


def start(codes: list[tuple[types.ModuleType, bytes]]) -> None:
    """Modules as an import runs them, with each pattern compiled as if for the first time."""
    re.purge()
    for module, code in codes:
        names = {name: getattr(module, name) for name in ("__name__", "__package__", "__file__", "__spec__")}
        exec(marshal.loads(code), {**names, "__builtins__": builtins})
    around = {"attr_dict": {"limit": types.SimpleNamespace(default=1)}, "NOTHING": None}
    for number in range(100):
        space: dict[str, object] = {}
        exec(compile(METHOD % number, f"<generated {number}>", "exec"), around, space)
        type(f"Record{number}", (), {**space, "__slots__": ("name", "limit", "parts")})


@types.coroutine
def turn():
    yield


async def stream(frames: list[bytes], held: deque[bytes]) -> int:
    """One stream: frames come, are read, changed and passed on."""
    count = 0
    for frame in frames:
        await turn()
        for line in frame.split(b"\n"):
            found = FIELD.match(line)
            if found is None or found[2] == b"[DONE]":
                continue
            read = json.loads(found[2])
            for choice in read.get("choices", ()):
                text = choice["delta"].get("content") or ""
                count += len(text.encode())
            read["id"] = f"chatcmpl-{count:08x}"
            held.append(b"data: " + json.dumps(read, separators=(",", ":")).encode() + b"\n\n")
            if len(held) > 64:
                held.popleft()
    return count


def serve(streams: int, tokens: int) -> int:
    """All streams in turns, as a scheduler has them."""
    frames = []
    for token in range(tokens):
        choice = {"index": 0, "delta": {"content": f" word{token} \u00e9"}, "finish_reason": None}
        chunk = {"id": "x", "object": "chat.completion.chunk", "created": 1, "model": "m", "choices": [choice]}
        frames.append(b"data: " + json.dumps(chunk).encode() + b"\n\n")
    held: deque[bytes] = deque()
    turns = deque(stream(frames, held) for _ in range(streams))
    total = 0
    while turns:
        coroutine = turns.popleft()
        try:
            coroutine.send(None)
        except StopIteration as ended:
            total += ended.value
        else:
            turns.append(coroutine)
    return total


def main() -> None:
    codes = []
    for name in MODULES:
        module = importlib.import_module(name)
        source = Path(module.__file__).read_text("utf-8")
        codes.append((module, marshal.dumps(compile(source, module.__file__, "exec"))))
    for _ in range(STARTS):
        start(codes)
    print(len(codes), serve(STREAMS, TOKENS))


if __name__ == "__main__":
    main()
