"""The CUDA kernels as numpy functions, for ``FakeDevice``: same arguments, same tables, same page-wise form.

Not the same bits (another exponential, another order within a dot product), but the same *properties*: the partial of a
page depends on nothing but the query row, its position and the page, and pages are folded in page order. Arrays have
one shape whatever the width of the step or the length of a page, since numpy may add in another order when a shape
changes. Where a CUDA kernel may meet anything (rows that nobody has written yet), so may these.

``kernels/README.md`` says what each argument is; they are named as there.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

import numpy as np
from numpy.typing import NDArray

from .fake_device import Kernel, Launch, Memory
from .kernels import HEAD_SIZES, TABLES_WORD_BYTES, TILE_BEGIN, TILE_END, VECTORS, WIDE_VECTORS
from .types import KVType, decode, encode

Floats = NDArray[np.float32]


def kv_write(memory: Memory, launch: Launch) -> None:
    k_source, v_source, k_rows, v_rows, rows, values, k_type, v_type = (int(value) for value in launch.args)
    for source, targets, code in ((k_source, k_rows, k_type), (v_source, v_rows, v_type)):
        raw = encode(_kind(code), memory.floats(source, rows * values).reshape(rows, values))
        for row, target in enumerate(memory.addresses(targets, rows)):
            memory.view(int(target), raw.shape[1])[:] = raw[row]


def kv_tables(memory: Memory, launch: Launch) -> None:
    source, target, words, scattered = (int(value) for value in launch.args)
    told = memory.view(source, TABLES_WORD_BYTES * words).reshape(words, TABLES_WORD_BYTES)
    places = memory.ints(source + told.nbytes, words).tolist() if scattered else range(words)
    for word, place in zip(told, places, strict=True):
        memory.view(target + TABLES_WORD_BYTES * place, TABLES_WORD_BYTES)[:] = word


class _Attention:
    """What one launch of ``kv_attend`` needs over and over. ``memory`` is read anew by every launch."""

    def __init__(self, memory: Memory, launch: Launch, head_size: int, halves: bool = False) -> None:
        (self.q, self.k_pages, self.v_pages, self.entries, self.positions, self.tiles, self.acc, self.ml, self.out) = (
            int(value) for value in launch.args[:9])
        self.scale = np.float32(launch.args[9])
        self.kv_heads, self.group, self.page_tokens, k_code, v_code, self.window = (
            int(value) for value in launch.args[10:])
        self.k_kind, self.v_kind = _kind(k_code), _kind(v_code)
        self.head_size = head_size
        self.q_heads = self.kv_heads * self.group
        self.memory, self._halves = memory, halves
        self._pages: dict[int, tuple[Floats, Floats]] = {}

    def entry(self, index: int) -> NDArray[np.int32]:
        return self.memory.ints(self.entries + 32 * index, 8)

    def page(self, slot: int) -> tuple[Floats, Floats]:
        """K and V of a page, f32[page_tokens, kv_heads, D]."""
        found = self._pages.get(slot)
        if found is None:
            found = (self._decoded(self.k_pages, slot, self.k_kind), self._decoded(self.v_pages, slot, self.v_kind))
            self._pages[slot] = found
        return found

    def _decoded(self, pages: int, slot: int, kind: KVType) -> Floats:
        values = self.kv_heads * self.head_size
        row_bytes = kind.row_bytes(values)
        address = int(self.memory.addresses(pages + 8 * slot, 1)[0])
        raw = self.memory.view(address, self.page_tokens * row_bytes).reshape(self.page_tokens, row_bytes)
        return self._rounded(decode(kind, raw, values)).reshape(self.page_tokens, self.kv_heads, self.head_size)

    def _rounded(self, values: Floats) -> Floats:
        """To the bits that f16 has, if that is how this kernel multiplies; whatever the size of the values."""
        if not self._halves:
            return values
        bits = values.view(np.uint32)
        odd = bits >> np.uint32(13) & np.uint32(1)
        return ((bits + np.uint32(0xFFF) + odd) & np.uint32(0xFFFFE000)).view(np.float32)

    def partial(self, entry: NDArray[np.int32], row: int) -> tuple[Floats, Floats, Floats]:
        """(maximum, sum, numerators) of each q head of a row over a page: [q_heads], [q_heads], [q_heads, D]."""
        slot, position, tokens = (int(value) for value in entry[:3])
        k, v = self.page(slot)
        size = self.q_heads * self.head_size
        q = self._rounded(self.memory.floats(self.q + 4 * row * size, size))
        q = q.reshape(self.kv_heads, self.group, self.head_size)
        distance = int(self.memory.ints(self.positions + 4 * row, 1)[0]) - (position + np.arange(self.page_tokens))
        seen = (distance >= 0) & (distance < self.window) & (np.arange(self.page_tokens) < tokens)
        mask = seen[:, None, None]
        with np.errstate(all="ignore"):  # rows that nobody wrote hold anything, and are masked
            scores = np.where(mask, (k[:, :, None, :] * q[None]).sum(axis=-1) * self.scale, np.float32(-np.inf))
            maximum = scores.max(axis=0)
            weights = np.where(mask, np.exp(scores - maximum), np.float32(0))
            terms = np.where(mask[..., None], weights[..., None] * v[:, :, None, :], np.float32(0))
        return (maximum.reshape(-1), weights.sum(axis=0).reshape(-1),
                terms.sum(axis=0).reshape(self.q_heads, self.head_size))

    def place(self, acc: int, ml: int, place: int) -> tuple[Floats, Floats]:
        """The numerators and the (maximum, sum) that are kept at a place, to read and to write."""
        size = self.q_heads * self.head_size
        return (self.memory.floats(acc + 4 * place * size, size).reshape(self.q_heads, self.head_size),
                self.memory.floats(ml + 8 * place * self.q_heads, 2 * self.q_heads).reshape(self.q_heads, 2))


def _attend(memory: Memory, launch: Launch, head_size: int) -> None:
    attention = _Attention(memory, launch, head_size)
    if attention.tiles:
        for tile in range(launch.grid[0]):
            _run_tile(attention, memory.ints(attention.tiles + 32 * tile, 8), VECTORS)
        return
    for index in range(launch.grid[0]):
        entry = attention.entry(index)
        first_row, rows, first_place = int(entry[3]), int(entry[4]), int(entry[5])
        for row in range(rows):
            maximum, total, terms = attention.partial(entry, first_row + row)
            acc, ml = attention.place(attention.acc, attention.ml, first_place + row)
            ml[:, 0], ml[:, 1] = maximum, total
            if total.any():
                acc[:] = terms


def _attend_wide(memory: Memory, launch: Launch, head_size: int) -> None:
    attention = _Attention(memory, launch, head_size, halves=True)
    for tile in range(launch.grid[0]):
        _run_tile(attention, memory.ints(attention.tiles + 32 * tile, 8), WIDE_VECTORS)


def _run_tile(attention: _Attention, tile: NDArray[np.int32], vectors: int) -> None:
    """The running form. A tile is 8 (or 64) of a sequence's (row, head of the group) vectors; here whole rows are
    computed, and what belongs to other tiles is not stored."""
    first_entry, entries, first_row, rows, first_vector, flags = (int(value) for value in tile[:6])
    group = attention.group
    for row in range(first_vector // group, min(rows, -(-(first_vector + vectors) // group))):
        low, high = (min(max(end - row * group, 0), group) for end in (first_vector, first_vector + vectors))
        mine = np.zeros((attention.kv_heads, group), bool)
        mine[:, low:high] = True
        heads = mine.reshape(-1)
        state_acc, state_ml = attention.place(attention.acc, attention.ml, first_row + row)
        acc, ml = np.zeros_like(state_acc), np.zeros_like(state_ml)
        ml[:, 0] = -np.inf
        if not flags & TILE_BEGIN:
            acc[heads], ml[heads] = state_acc[heads], state_ml[heads]
        for index in range(first_entry, first_entry + entries):
            acc, ml = _folded(acc, ml, *attention.partial(attention.entry(index), first_row + row))
        if flags & TILE_END:
            size = attention.q_heads * attention.head_size
            out = attention.memory.floats(attention.out + 4 * (first_row + row) * size, size)
            out.reshape(attention.q_heads, attention.head_size)[heads] = _divided(acc, ml)[heads]
        else:
            state_acc[heads], state_ml[heads] = acc[heads], ml[heads]


def kv_fold(memory: Memory, launch: Launch, head_size: int) -> None:
    acc, ml, rows, out, q_heads = (int(value) for value in launch.args)
    size = q_heads * head_size
    for first, stride, pages, row in memory.ints(rows, 4 * launch.grid[1]).reshape(-1, 4).tolist():
        state_acc = np.zeros((q_heads, head_size), np.float32)
        state_ml = np.zeros((q_heads, 2), np.float32)
        state_ml[:, 0] = -np.inf
        for page in range(pages):
            place = first + page * stride
            terms = memory.floats(acc + 4 * place * size, size).reshape(q_heads, head_size)
            sums = memory.floats(ml + 8 * place * q_heads, 2 * q_heads).reshape(q_heads, 2)
            state_acc, state_ml = _folded(state_acc, state_ml, sums[:, 0], sums[:, 1], terms)
        memory.floats(out + 4 * row * size, size).reshape(q_heads, head_size)[:] = _divided(state_acc, state_ml)


def _folded(acc: Floats, ml: Floats, maximum: Floats, total: Floats, terms: Floats) -> tuple[Floats, Floats]:
    """The state after one more page. A page that shows a head nothing leaves its state alone."""
    with np.errstate(all="ignore"):
        top = np.maximum(ml[:, 0], maximum)
        old, new = np.exp(ml[:, 0] - top), np.exp(maximum - top)
        sums = np.stack([top, ml[:, 1] * old + total * new], axis=1)
        both = acc * old[:, None] + terms * new[:, None]
    seen = total != 0  # a sum that is no number is handed on
    return np.where(seen[:, None], both, acc), np.where(seen[:, None], sums, ml)


def _divided(acc: Floats, ml: Floats) -> Floats:
    total = ml[:, 1:]
    return np.where(total != 0, acc / np.where(total != 0, total, np.float32(1)), np.float32(0))


def _kind(code: int) -> KVType:
    return next(kind for kind in KVType if kind.code == code)


def _attend_of(head_size: int) -> Kernel:
    return lambda memory, launch: _attend(memory, launch, head_size)


def _wide_of(head_size: int) -> Kernel:
    return lambda memory, launch: _attend_wide(memory, launch, head_size)


def _fold_of(head_size: int) -> Kernel:
    return lambda memory, launch: kv_fold(memory, launch, head_size)


KERNELS: Final[Mapping[str, Kernel]] = MappingProxyType({
    "kv_write": kv_write,
    "kv_tables": kv_tables,
    **{f"kv_attend_{size}": _attend_of(size) for size in HEAD_SIZES},
    **{f"kv_wide_{size}": _wide_of(size) for size in HEAD_SIZES},
    **{f"kv_fold_{size}": _fold_of(size) for size in HEAD_SIZES},
})
