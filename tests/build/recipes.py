"""The recipes of ``build/``, imported for their tests: that folder holds programs and is no package."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parents[2]
BUILD = ROOT / "build"


def recipe(name: str) -> ModuleType:
    """``pack`` is build/pack.py, ``launcher/compile`` build/launcher/compile.py."""
    path = BUILD / f"{name}.py"
    spec = importlib.util.spec_from_file_location(f"kvstream_build_{path.stem}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    sys.path.insert(0, str(BUILD))  # as for a program there: they import each other
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(BUILD))
    return module
