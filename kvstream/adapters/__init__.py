"""Protocol translators, one per kind of runtime. ``DESIGN.md`` says how to add one."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from .assemble import Assembler
from .llamacpp import LlamaCppBackend
from .ollama import OllamaBackend
from .openai import OpenAIBackend

ADAPTERS: Mapping[str, type[Any]] = MappingProxyType(
    {backend.kind: backend for backend in (LlamaCppBackend, OpenAIBackend, OllamaBackend)}
)
"""The adapters by the name that the configuration uses."""

__all__ = ["ADAPTERS", "Assembler", "LlamaCppBackend", "OllamaBackend", "OpenAIBackend"]
