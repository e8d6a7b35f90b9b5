"""What the kernels beside this file take, as numbers: arguments, grids, blocks, shared memory. ``README.md`` explains.

``kv.fatbin`` is built from ``kv.cu`` by ``just kernels``; ``kernels.txt`` is what the compiler said of it (registers,
spills, sizes). Who launches is ``cuda.device``.
"""

from __future__ import annotations

from typing import Final

HEAD_SIZES: Final = (64, 80, 96, 128, 256)
VECTORS: Final = 8
"""Query heads of one kv head, over one or several rows, that one block takes."""

WIDE_VECTORS: Final = 64
"""The same for a block of ``kv_wide``."""
WIDE_THREADS: Final = 128
WIDE_ROWS_MIN: Final = 33
"""New rows of one sequence in a step from which ``kv_wide`` may attend for them: more than a verify step ever has."""

ENTRY_INTS: Final = 8
TILE_INTS: Final = 8
FOLD_INTS: Final = 4
TILE_BEGIN: Final = 1
TILE_END: Final = 2
GROUP_MAX: Final = 16
PAGE_TOKENS_STEP: Final = 8
PAGE_TOKENS_MAX: Final = 512
WINDOW_NONE: Final = 2**31 - 1

WRITE_THREADS: Final = 128
TABLES_THREADS: Final = 256
TABLES_BLOCKS_MAX: Final = 64
TABLES_WORD_BYTES: Final = 16
WRITE_FORMAT: Final = "PPPPiiii"
ATTEND_FORMAT: Final = "PPPPPPPPPfiiiiii"
FOLD_FORMAT: Final = "PPPPi"
TABLES_FORMAT: Final = "PPii"
"""The letters of PyCUDA's ``prepare``: P an address, i a 32-bit integer, f an f32."""

Grid = tuple[int, int, int]


def kernel_formats() -> dict[str, str]:
    """Every kernel of the image, with the format of its arguments."""
    formats = {"kv_write": WRITE_FORMAT, "kv_tables": TABLES_FORMAT}
    for head_size in HEAD_SIZES:
        formats[f"kv_attend_{head_size}"] = formats[f"kv_wide_{head_size}"] = ATTEND_FORMAT
        formats[f"kv_fold_{head_size}"] = FOLD_FORMAT
    return formats


def attend_splits(head_size: int) -> int:
    """Groups of threads that a page's tokens are dealt to when V is summed."""
    return 4 if head_size == 256 else 8


def attend_threads(head_size: int) -> int:
    return head_size // 4 * attend_splits(head_size)


def attend_shared_bytes(head_size: int, page_tokens: int, running: bool) -> int:
    floats = 10 * head_size + VECTORS * page_tokens + 2 * attend_splits(head_size) * head_size + 64
    if running:
        floats += VECTORS * head_size + 32
    return 4 * floats


def wide_shared_bytes(head_size: int) -> int:
    tokens = 16 if head_size == 256 else 32
    key_words = head_size // 2 + (0 if head_size // 2 % 16 == 8 else 8)
    value_words = 2 * head_size + 8
    return 4 * (tokens * key_words + tokens // 4 * value_words + 16 + WIDE_THREADS // 32 + 2 * WIDE_VECTORS)


def tiles(rows: int, group: int, vectors: int = VECTORS) -> int:
    """Blocks per kv head that the rows of one sequence take."""
    return -(-rows * group // vectors)


def table_grid(entries: int, kv_heads: int, rows_max: int, group: int) -> Grid:
    return entries, kv_heads, tiles(rows_max, group)


def running_grid(tile_count: int, kv_heads: int) -> Grid:
    return tile_count, kv_heads, 1


def fold_grid(rows: int, q_heads: int) -> Grid:
    return q_heads, rows, 1


def write_grid(rows: int, values: int) -> Grid:
    return -(-rows * -(-values // 32) // WRITE_THREADS), 2, 1


def tables_grid(words: int) -> Grid:
    return min(TABLES_BLOCKS_MAX, -(-words // TABLES_THREADS)), 1, 1


def tables_bytes(words: int, scattered: bool) -> int:
    """Host memory that a launch of ``kv_tables`` reads."""
    return words * (TABLES_WORD_BYTES + 4 * scattered)
