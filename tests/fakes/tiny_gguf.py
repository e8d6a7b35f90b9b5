"""Tiny models of random weights with the tokenizer of SmolLM2: what they say is nonsense, how they keep state is real.

``mamba``: recurrent; its state is of one point in time and cannot be cut back. ``gemma3``: attention over a window in
five of six layers, of which a server keeps the last tokens only. ``llama``: plain attention, for comparison.

Written by hand, since a GGUF file is a list of typed values, a list of tensors, and their bytes::

    "GGUF" 3 tensors values · (key type value)* · (name dims type offset)* · padding · data, each tensor at 32 bytes
"""

from __future__ import annotations

import random
import struct
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from tests.record import model_path

Kind = Literal["llama", "mamba", "gemma3"]

WIDTH, CONTEXT, WINDOW, WORDS = 64, 8192, 32, 49152
HEADS, HEAD = 2, 32
INNER, STATE, STEP, KERNEL = 128, 16, 4, 4
LAYERS: dict[Kind, int] = {"llama": 2, "mamba": 2, "gemma3": 6}

_ALIGN, _F32, _Q8 = 32, 0, 8
_U32, _FLOAT, _STRING, _ARRAY = 4, 6, 8, 9
_SIZES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
Tensor = tuple[str, tuple[int, ...], int, bytes]


def make(kind: Kind, path: Path) -> Path:
    """Write the model to ``path``; the same bytes every time."""
    values = [*_values(kind), *_tokenizer(model_path().read_bytes())]
    tensors = list(_tensors(kind, random.Random(1)))
    infos, data = b"", b""
    for name, shape, code, content in tensors:
        infos += _text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, code, len(data))
        data += content + bytes(-len(content) % _ALIGN)
    head = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(values)) + b"".join(values) + infos
    path.write_bytes(head + bytes(-len(head) % _ALIGN) + data)
    return path


def _text(text: str) -> bytes:
    return struct.pack("<Q", len(text)) + text.encode("ascii")


def _values(kind: Kind) -> Iterator[bytes]:
    yield _text("general.architecture") + struct.pack("<I", _STRING) + _text(kind)
    numbers = {"block_count": LAYERS[kind], "context_length": CONTEXT, "embedding_length": WIDTH}
    if kind == "mamba":
        numbers |= {"feed_forward_length": 0, "attention.head_count": 0, "ssm.conv_kernel": KERNEL,
                    "ssm.inner_size": INNER, "ssm.state_size": STATE, "ssm.time_step_rank": STEP}
    else:
        numbers |= {"feed_forward_length": 2 * WIDTH, "attention.head_count": HEADS, "attention.head_count_kv": 1,
                    "attention.key_length": HEAD, "attention.value_length": HEAD}
    if kind == "gemma3":
        numbers["attention.sliding_window"] = WINDOW
    for name, number in numbers.items():
        yield _text(f"{kind}.{name}") + struct.pack("<II", _U32, number)
    yield _text(f"{kind}.attention.layer_norm_rms_epsilon") + struct.pack("<If", _FLOAT, 1e-6)


def _tokenizer(source: bytes) -> Iterator[bytes]:
    """The values of another model's tokenizer, as they stand there."""
    (count,) = struct.unpack_from("<Q", source, 16)
    at = 24
    for _ in range(count):
        start = at
        (length,) = struct.unpack_from("<Q", source, at)
        key = source[at + 8 : at + 8 + length]
        (kind,) = struct.unpack_from("<I", source, at + 8 + length)
        at = _after(source, at + 12 + length, kind)
        if key.startswith(b"tokenizer."):
            yield source[start:at]


def _after(source: bytes, at: int, kind: int) -> int:
    """Where a value of this kind ends."""
    if kind == _STRING:
        return at + 8 + int(struct.unpack_from("<Q", source, at)[0])
    if kind != _ARRAY:
        return at + _SIZES[kind]
    inner, count = struct.unpack_from("<IQ", source, at)
    at += 12
    if inner != _STRING:
        return at + int(count) * _SIZES[inner]
    for _ in range(count):
        at += 8 + int(struct.unpack_from("<Q", source, at)[0])
    return at


def _tensors(kind: Kind, dice: random.Random) -> Iterator[Tensor]:
    """Shapes with the inner dimension first."""
    def noise(name: str, *shape: int) -> Tensor:
        size = 1
        for side in shape:
            size *= side
        return name, shape, _F32, array("f", (dice.gauss(0, 0.05) for _ in range(size))).tobytes()

    def same(name: str, value: float, *shape: int) -> Tensor:
        size = shape[0] * (shape[1] if len(shape) > 1 else 1)
        return name, shape, _F32, array("f", [value] * size).tobytes()

    # Three million numbers: in blocks of 32 bytes with a scale, which cost a line to draw.
    drawn, scale = dice.randbytes(WORDS * WIDTH), struct.pack("<e", 0.001)
    yield "token_embd.weight", (WIDTH, WORDS), _Q8, b"".join(
        scale + drawn[at : at + 32] for at in range(0, len(drawn), 32))
    yield same("output_norm.weight", 1, WIDTH)
    for layer in range(LAYERS[kind]):
        block = f"blk.{layer}."
        yield same(f"{block}attn_norm.weight", 1, WIDTH)
        if kind == "mamba":
            yield noise(f"{block}ssm_in.weight", WIDTH, 2 * INNER)
            yield noise(f"{block}ssm_conv1d.weight", KERNEL, INNER)
            yield noise(f"{block}ssm_conv1d.bias", INNER)
            yield noise(f"{block}ssm_x.weight", INNER, STEP + 2 * STATE)
            yield noise(f"{block}ssm_dt.weight", STEP, INNER)
            yield noise(f"{block}ssm_dt.bias", INNER)
            yield same(f"{block}ssm_a", -1, STATE, INNER)
            yield same(f"{block}ssm_d", 1, INNER)
            yield noise(f"{block}ssm_out.weight", INNER, WIDTH)
            continue
        yield noise(f"{block}attn_q.weight", WIDTH, HEADS * HEAD)
        yield noise(f"{block}attn_k.weight", WIDTH, HEAD)
        yield noise(f"{block}attn_v.weight", WIDTH, HEAD)
        yield noise(f"{block}attn_output.weight", HEADS * HEAD, WIDTH)
        yield same(f"{block}ffn_norm.weight", 1, WIDTH)
        yield noise(f"{block}ffn_gate.weight", WIDTH, 2 * WIDTH)
        yield noise(f"{block}ffn_up.weight", WIDTH, 2 * WIDTH)
        yield noise(f"{block}ffn_down.weight", 2 * WIDTH, WIDTH)
        if kind == "gemma3":
            for name, width in (("attn_q_norm", HEAD), ("attn_k_norm", HEAD), ("post_attention_norm", WIDTH),
                                ("post_ffw_norm", WIDTH)):
                yield same(f"{block}{name}.weight", 1, width)
