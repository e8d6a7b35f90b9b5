"""What is simulated: a GPU as a handful of constants, and the shape of a model.

A step's time is made of three constants of the card. ``c0``: everything but attention, which for one token is the time
to read the weights. ``c1``: attention over 1,000 tokens of context. ``h2d``: what the link carries from pinned memory.
Of the two cards that somebody measured they are fitted to those measurements, of others they are scaled, and
``basis`` says so: a simulated figure is as good as its constants.

The published figures are those of the adaptive KV streaming fork of llama.cpp that KVStream's streaming descends from:
its author's on an RTX 5070 Ti, a user's on an RTX 5060 Ti.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from types import MappingProxyType
from typing import Any

from attrs import NOTHING, field, fields, frozen

from ..cuda.layout import Geometry
from ..cuda.types import KVType
from ..errors import ConfigError

GIB = 1 << 30
TOKENS = 1000  # what "per 1K tokens" counts in the fits


@frozen
class Model:
    """The attention of a model, and what else of it lies on the device. ``layers`` counts those with full attention."""

    name: str
    layers: int
    kv_heads: int
    q_heads: int
    head_size: int
    weights_mib: float
    state_mib: float = 0.0

    def geometry(self, k_type: KVType, v_type: KVType, page_tokens: int) -> Geometry:
        """*Errors*: ConfigError."""
        return Geometry(self.layers, self.kv_heads, self.q_heads, self.head_size, k_type, v_type, page_tokens)

    @property
    def attention_values(self) -> int:
        """What the cost of attention is proportional to: query values of one token in all layers."""
        return self.layers * self.q_heads * self.head_size


@frozen
class Published:
    """One measured point: tokens of prompt, tokens per second of prefill and decode, the pool it was taken with."""

    context: int
    decode_tps: float
    prefill_tps: float | None = None


@frozen
class Profile:
    """A card. Times in ms, for the model it is fitted to; other models are scaled from it.

    ``prefill_ms`` and ``prefill_ms_per_1k`` are per prompt token: without attention, and what 1,000 tokens of context
    before it add. ``usable_mib``: memory that one process can have. ``call_ms``: what a copy costs beside its bytes.
    ``published_pool_mib``: (context, MiB) at which the published points were taken, straight lines in between.
    """

    name: str
    h2d_gib_s: float
    hbm_gb_s: float
    c0_ms: float
    c1_ms_per_1k_tokens: float
    prefill_ms: float
    prefill_ms_per_1k: float
    usable_mib: float
    basis: str
    call_ms: float = 0.002
    published_pool_mib: tuple[tuple[int, int], ...] = ()
    published: tuple[Published, ...] = field(default=(), repr=False)

    def decode_ms(self, model: Model) -> float:
        """One token without its attention."""
        if model.name == FITTED_TO:
            return self.c0_ms
        return model.weights_mib * 2**20 / (self.hbm_gb_s * 1e6)

    def attention_ms(self, model: Model, context: float) -> float:
        """The attention of one token over a context."""
        return self.c1_ms_per_1k_tokens * context / TOKENS * self._attention_scale(model)

    def prefill_step_ms(self, model: Model, tokens: int, context: float) -> tuple[float, float]:
        """Of a micro-batch: without attention, and its attention over a context."""
        weights = 1.0 if model.name == FITTED_TO else model.weights_mib / MODELS[FITTED_TO].weights_mib
        attention = self.prefill_ms_per_1k * context / TOKENS * self._attention_scale(model)
        return tokens * self.prefill_ms * weights, tokens * attention

    def copy_ms(self, size: int) -> float:
        return size / (self.h2d_gib_s * GIB) * 1e3

    def pool_free_mib(self, model: Model, margin_mib: float) -> float:
        """What the weights and everything else leave for the pool, its workspaces included."""
        return self.usable_mib - model.weights_mib - model.state_mib - ACTIVATIONS_MIB - margin_mib

    def published_at(self, context: int) -> Published | None:
        return next((point for point in self.published if point.context == context), None)

    def published_pool_at(self, context: int) -> int | None:
        """The pool of the published figures at a context. None when the card has none."""
        known = self.published_pool_mib
        if not known:
            return None
        for (low, low_mib), (high, high_mib) in pairwise(known):
            if context <= high:
                share = max(0.0, (context - low) / (high - low))
                return round(low_mib + share * (high_mib - low_mib))
        return known[-1][1]

    @staticmethod
    def _attention_scale(model: Model) -> float:
        return model.attention_values / MODELS[FITTED_TO].attention_values


POSITIVE = ("h2d_gib_s", "hbm_gb_s")
FITTED_TO = "qwen3.8-27b"
ACTIVATIONS_MIB = 96.0
"""Inputs and outputs of the other kernels at 512 tokens, and logits."""

MODELS: Mapping[str, Model] = MappingProxyType({model.name: model for model in (
    Model(FITTED_TO, 16, 4, 24, 256, weights_mib=13107, state_mib=150),
    Model("llama-3.1-8b", 32, 8, 32, 128, weights_mib=4692),
    Model("smollm2-135m", 30, 3, 9, 64, weights_mib=92),
)})

PROFILES: Mapping[str, Profile] = MappingProxyType({profile.name: profile for profile in (
    Profile(
        "rtx-5070-ti", h2d_gib_s=45.8, hbm_gb_s=896, c0_ms=15.65, c1_ms_per_1k_tokens=0.174, prefill_ms=0.684,
        prefill_ms_per_1k=0.0053, usable_mib=15667, basis="fitted to published figures",
        published_pool_mib=((65536, 2048), (163584, 2048)),
        published=(
            Published(65536, 36.92, 1186), Published(81920, 33.48, 1082), Published(98304, 30.5, 1057),
            Published(131072, 25.69, 978), Published(163584, 17.91, 891))),
    Profile(
        "rtx-5060-ti", h2d_gib_s=23.5, hbm_gb_s=448, c0_ms=42.9, c1_ms_per_1k_tokens=0.212, prefill_ms=1.03,
        prefill_ms_per_1k=0.0148, usable_mib=15667, basis="fitted to published figures",
        published_pool_mib=((8192, 2528), (65536, 2240), (180224, 1760)),
        published=(
            Published(8192, 22.4, 860), Published(32768, 20.07, 765), Published(65536, 17.63, 664),
            Published(98304, 14.89, 584), Published(122880, 13.41, 526), Published(131072, 12.96, 507),
            Published(147456, 11.74, 471), Published(163840, 9.7, 432), Published(180224, 8.15, 406))),
    Profile(
        "h200", h2d_gib_s=45.8, hbm_gb_s=4800, c0_ms=2.86, c1_ms_per_1k_tokens=0.114, prefill_ms=0.125,
        prefill_ms_per_1k=0.001, usable_mib=142336,
        basis="estimated: weights over memory bandwidth, attention by arithmetic rate from the 5070 Ti, PCIe 5"),
)})


def profile_from(value: Any, where: str) -> Profile:
    """A profile as a JSON object: the fields of ``Profile`` but ``published``. *Errors*: ConfigError."""
    return Profile(**_checked(Profile, value, where, ("published", "published_pool_mib"), {"basis": where}))


def model_from(value: Any, where: str) -> Model:
    """A model as a JSON object with the fields of ``Model``. *Errors*: ConfigError."""
    return Model(**_checked(Model, value, where))


def _checked(kind: Any, value: Any, where: str, leave_out: tuple[str, ...] = (),
             defaults: Mapping[str, object] = MappingProxyType({})) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ConfigError(f"{where} is no JSON object")
    wanted = {attribute.name: attribute for attribute in fields(kind) if attribute.name not in leave_out}
    problems = [f"{where}: {name} is no field of it" for name in value if name not in wanted]
    made = {**defaults, **value}
    for name, attribute in wanted.items():
        if name in made:
            must_be = _wrong(str(attribute.type), made[name], name in POSITIVE)
            if must_be:
                problems.append(f"{where}: {name} must be {must_be}")
        elif attribute.default is NOTHING:
            problems.append(f"{where}: {name} is missing")
    if problems:
        raise ConfigError(problems)
    return made


def _wrong(kind: str, value: Any, positive: bool) -> str | None:
    if kind == "str":
        return None if isinstance(value, str) and value else "a text"
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < float("inf"):
        return "a number from 0 on"
    if kind == "int":
        return None if isinstance(value, int) and value >= 1 else "a whole number from 1 on"
    return "more than 0" if positive and value == 0 else None
