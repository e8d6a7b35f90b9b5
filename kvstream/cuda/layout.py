"""Where everything lies: the shape of the model's KV, and offsets in the two pieces of memory that hold it.

**The slab** is pinned host memory and has the truth. For each layer it is a K plane and then a V plane, ``host_pages``
pages each. A host page is one id for all layers, and pages with adjacent ids are adjacent in every plane, so that a run
of pages of one layer is two copies::

    | layer 0: K of page 0, 1, ... | V of page 0, 1, ... | layer 1: K ... | V ... | ... | staging |

**The pool** is one allocation on the device. A cell holds one page of one layer, whichever: all K parts of the cells,
then all V parts, then the workspaces::

    | K of cell 0, 1, ... | V of cell 0, 1, ... | workspaces |

Whether a cell is resident, in transit or a tail is in the planner's map and nowhere here, so that changing one's mind
moves no byte. Every page part is padded to ``ALIGNMENT``, so that kernels may load wide from its beginning.

**Workspaces** are all the memory that a step needs besides cells, sized for the largest step that is allowed and
allocated with the pool: nothing is allocated later, so nothing can fail in the middle of a request. ``staging`` is the
pinned end of what is sent at the beginning of a step; there are two, because the host may write the next step's while
the last one's is still being read.

All sizes are in bytes, all offsets from the beginning of the slab or the pool.
"""

from __future__ import annotations

from attrs import evolve, field, frozen

from ..errors import ConfigError
from .types import KVType

HEAD_SIZES = (64, 80, 96, 128, 256)
"""There is a kernel for each of these."""
GROUP_MAX = 16
"""Query heads that may share a KV head."""
PAGE_TOKENS_STEP, PAGE_TOKENS_MAX = 32, 512

ALIGNMENT = 128
WORKSPACE_ALIGNMENT = 256

ENTRY_INTS, TILE_INTS, FOLD_INTS = 8, 8, 4
"""What the kernels are told of a page of a sequence, a tile of query vectors, and a row to fold (kernels/README.md)."""
TILE_VECTORS = 8
"""Query vectors (a row's query head each) of one tile."""

TABLE_BYTES_MAX = 32 << 20
"""The table of partial results is no larger than this unless asked for: steps that need more use the running form."""
TILE_BYTES_MAX = 4 << 20
"""Nor is what is said of tiles, which grows with the waves of a step: one with very many is sent in pieces."""

INDEX_MAX = (1 << 31) - 1
ROWS_MAX = 1 << 20
SEQUENCES_MAX = 2047
"""What 32-bit integers hold, also multiplied by the blocks of a row, and what a grid takes: a fold has its rows in the
second dimension, which goes to 65,535, and a sequence brings up to 32 (``plan.TABLE_ROWS_MAX``)."""


def _padded(size: int, to: int) -> int:
    return -(-size // to) * to


@frozen
class Geometry:
    """The shape of one model's KV. ``layers`` counts the layers with attention over the whole context.

    A row is one token's values of all KV heads in one layer; rows of quantised types need kv_heads * head_size to be a
    multiple of 32. Raises ConfigError with everything that is wrong.
    """

    layers: int
    kv_heads: int
    q_heads: int
    head_size: int
    k_type: KVType
    v_type: KVType
    page_tokens: int = 256

    def __attrs_post_init__(self) -> None:
        problems = [f"{name} is {value}, it must be at least 1"
                    for name, value in (("layers", self.layers), ("kv_heads", self.kv_heads), ("q_heads", self.q_heads))
                    if value < 1]
        if not problems and self.q_heads % self.kv_heads:
            problems.append(f"{self.q_heads} query heads cannot share {self.kv_heads} KV heads evenly")
        elif not problems and self.group > GROUP_MAX:
            problems.append(f"{self.group} query heads share a KV head; the kernels take up to {GROUP_MAX}")
        if self.head_size not in HEAD_SIZES:
            problems.append(f"there is no kernel for head size {self.head_size}; there are "
                            f"{', '.join(map(str, HEAD_SIZES))}")
        for name, kind in (("K", self.k_type), ("V", self.v_type)):
            if self.row_values % kind.block_values:
                problems.append(f"a {name} row has {self.kv_heads} * {self.head_size} = {self.row_values} values, and "
                                f"{kind} stores multiples of {kind.block_values}")
        if not 1 <= self.page_tokens <= PAGE_TOKENS_MAX or self.page_tokens % PAGE_TOKENS_STEP:
            problems.append(f"pages of {self.page_tokens} tokens: it must be a multiple of {PAGE_TOKENS_STEP} up to "
                            f"{PAGE_TOKENS_MAX}")
        if problems:
            raise ConfigError(problems)

    @property
    def row_values(self) -> int:
        return self.kv_heads * self.head_size

    @property
    def group(self) -> int:
        """Query heads per KV head."""
        return self.q_heads // self.kv_heads

    @property
    def k_row_bytes(self) -> int:
        return self.k_type.row_bytes(self.row_values)

    @property
    def v_row_bytes(self) -> int:
        return self.v_type.row_bytes(self.row_values)

    @property
    def k_page_bytes(self) -> int:
        return _padded(self.page_tokens * self.k_row_bytes, ALIGNMENT)

    @property
    def v_page_bytes(self) -> int:
        return _padded(self.page_tokens * self.v_row_bytes, ALIGNMENT)

    @property
    def page_bytes(self) -> int:
        """K and V of one page of one layer: what one cell holds."""
        return self.k_page_bytes + self.v_page_bytes

    @property
    def partial_bytes(self) -> int:
        """The partial result of one query row over one page, all its heads: head_size numerators, maximum and sum."""
        return self.q_heads * (self.head_size + 2) * 4

    def pages(self, tokens: int) -> int:
        """Pages that so many tokens take."""
        return -(-tokens // self.page_tokens)


@frozen
class Workspace:
    name: str
    offset: int
    size: int


@frozen
class Layout:
    """Offsets for one pool and one slab. Made by ``plan_layout``, which says what does not fit.

    ``rows_max``: new tokens in one step, all sequences together. ``sequences_max``: sequences in one step.
    ``context_max``: tokens of the longest sequence. ``table_slots``: partial results that the table holds, each of one
    query row (all its heads) over one page.
    """

    geometry: Geometry
    cells: int
    host_pages: int
    rows_max: int
    sequences_max: int
    context_max: int
    table_slots: int
    workspaces: tuple[Workspace, ...] = field(init=False, repr=False)

    def __attrs_post_init__(self) -> None:
        offset = _padded(self.cells * self.geometry.page_bytes, WORKSPACE_ALIGNMENT)
        placed = []
        for name, size in workspace_sizes(self.geometry, self.rows_max, self.sequences_max, self.context_max,
                                          self.table_slots):
            placed.append(Workspace(name, offset, size))
            offset += _padded(size, WORKSPACE_ALIGNMENT)
        object.__setattr__(self, "workspaces", tuple(placed))

    # the pool

    def k_cell(self, cell: int) -> int:
        return cell * self.geometry.k_page_bytes

    def v_cell(self, cell: int) -> int:
        return self.cells * self.geometry.k_page_bytes + cell * self.geometry.v_page_bytes

    def workspace(self, name: str) -> Workspace:
        return next(workspace for workspace in self.workspaces if workspace.name == name)

    @property
    def pool_bytes(self) -> int:
        last = self.workspaces[-1]
        return last.offset + _padded(last.size, WORKSPACE_ALIGNMENT)

    @property
    def workspace_bytes(self) -> int:
        return self.pool_bytes - self.workspaces[0].offset

    @property
    def tile_slots(self) -> int:
        return tile_slots(self.geometry, self.rows_max, self.sequences_max, self.context_max)

    @property
    def entries_max(self) -> int:
        """Pages that one layer may have to attend in one step: each of every sequence, shared ones as often as they
        are shared."""
        return self.sequences_max * self.geometry.pages(self.context_max)

    # the slab

    def k_host(self, layer: int, page: int) -> int:
        return layer * self.host_pages * self.geometry.page_bytes + page * self.geometry.k_page_bytes

    def v_host(self, layer: int, page: int) -> int:
        geometry = self.geometry
        return (layer * geometry.page_bytes + geometry.k_page_bytes) * self.host_pages + page * geometry.v_page_bytes

    @property
    def slab_bytes(self) -> int:
        return self.geometry.layers * self.host_pages * self.geometry.page_bytes

    @property
    def staging_bytes(self) -> int:
        """One of the two stagings: the tables of a step, as they are sent."""
        return staging_size(self.workspaces)

    def staging(self, which: int) -> int:
        return self.slab_bytes + which * self.staging_bytes

    @property
    def host_bytes(self) -> int:
        return self.slab_bytes + 2 * self.staging_bytes


STAGED = ("pointers", "targets", "entries", "tiles", "folds", "positions")
"""The workspaces that are written from the host at the beginning of a step. They lie next to each other, so that one
copy does."""


def workspace_sizes(geometry: Geometry, rows_max: int, sequences_max: int, context_max: int,
                    table_slots: int) -> tuple[tuple[str, int], ...]:
    """Name and size of each, in the order in which they lie.

    * ``pointers``: u64[layers][2][entries], where K and V of each page are, K first. ``targets``: u64[layers][2][rows],
      where each new row is to be written. Of i32: ``entries``[layers][entries][8], ``tiles``[slots][8],
      ``folds``[layers][rows][4], ``positions``[rows].
    * ``q``, ``k``, ``v``: f32 inputs of one layer; ``out``: f32[rows][q_heads][head_size].
    * ``state``: the running numerators of each query row, f32[rows][q_heads][head_size], and ``state_ml`` its maximum
      and sum, f32[rows][q_heads][2]. ``table`` and ``table_ml``: those of single pages, with slots for rows.
    """
    entries = sequences_max * geometry.pages(context_max)
    heads, head_bytes = geometry.q_heads, geometry.head_size * 4
    kv_bytes = rows_max * geometry.row_values * 4
    return (
        ("pointers", geometry.layers * 2 * entries * 8),
        ("targets", geometry.layers * 2 * rows_max * 8),
        ("entries", geometry.layers * entries * ENTRY_INTS * 4),
        ("tiles", tile_slots(geometry, rows_max, sequences_max, context_max) * TILE_INTS * 4),
        ("folds", geometry.layers * rows_max * FOLD_INTS * 4),
        ("positions", rows_max * 4),
        ("q", rows_max * heads * head_bytes),
        ("k", kv_bytes),
        ("v", kv_bytes),
        ("out", rows_max * heads * head_bytes),
        ("state", rows_max * heads * head_bytes),
        ("state_ml", rows_max * heads * 8),
        ("table", table_slots * heads * head_bytes),
        ("table_ml", table_slots * heads * 8),
    )


def tiles_max(geometry: Geometry, rows_max: int, sequences_max: int) -> int:
    """Tiles of one wave: the vectors of a sequence are cut into whole tiles, the last of which may be partly empty."""
    sequences = min(sequences_max, rows_max)
    return (rows_max * geometry.group + sequences * (TILE_VECTORS - 1)) // TILE_VECTORS


def tile_slots(geometry: Geometry, rows_max: int, sequences_max: int, context_max: int) -> int:
    """Tiles that can be told of at once: all of a step that attends one page per wave, if that is not too much, and at
    least all of one wave in every layer."""
    wave = geometry.layers * tiles_max(geometry, rows_max, sequences_max)
    waves = sequences_max * geometry.pages(context_max)
    return max(wave, min(wave * waves, TILE_BYTES_MAX // (TILE_INTS * 4)))


def staging_size(workspaces: tuple[Workspace, ...]) -> int:
    staged = [workspace for workspace in workspaces if workspace.name in STAGED]
    return _padded(staged[-1].offset + staged[-1].size - staged[0].offset, WORKSPACE_ALIGNMENT)


def cells_min(geometry: Geometry, rows_max: int, sequences_max: int) -> int:
    """The fewest cells with which every step can be done: a tail of every sequence in every layer, the further pages
    that the new rows of one layer may fill, and one cell for everything else to pass through."""
    several = min(sequences_max, rows_max // 2)  # two rows are enough to fill a page and begin another
    filled = several + (rows_max - 2 * several) // geometry.page_tokens
    return geometry.layers * sequences_max + filled + 1


def plan_layout(geometry: Geometry, pool_bytes: int, host_bytes: int, rows_max: int, sequences_max: int,
                context_max: int, table_slots: int | None = None, *, host_taken: int = 0) -> Layout:
    """The layout with the most cells and host pages that the two budgets allow. ``host_taken``: bytes of the host's
    that are needed for something else.

    Raises ConfigError, with the numbers, when a sequence of ``context_max`` tokens does not fit into ``host_bytes``, or
    the workspaces and the fewest cells not into ``pool_bytes``.
    """
    problems = [f"{name} is {value}, it must be at least 1" if value < 1 else
                f"{name} is {value}, the kernels can count to {most}"
                for name, value, most in (("rows_max", rows_max, ROWS_MAX), ("context_max", context_max, INDEX_MAX),
                                          ("sequences_max", sequences_max, SEQUENCES_MAX),
                                          ("table_slots", 1 if table_slots is None else table_slots, INDEX_MAX))
                if not 1 <= value <= most]
    if problems:
        raise ConfigError(problems)

    def with_pool(size: int, cells: int) -> Layout:
        """So many cells, and the workspaces of a pool of that size."""
        slots = table_slots
        if slots is None:
            slots_max = min(TABLE_BYTES_MAX, size // 16) // geometry.partial_bytes
            slots = max(1, min(sequences_max * geometry.pages(context_max), slots_max))
        return Layout(geometry, cells, 0, rows_max, sequences_max, context_max, slots)

    bare = with_pool(pool_bytes, 0)
    host_page = geometry.layers * geometry.page_bytes
    host_pages = (host_bytes - host_taken - bare.host_bytes) // host_page
    host_pages_min = max(geometry.pages(context_max), sequences_max)
    if host_pages < host_pages_min:
        what = f"{context_max} tokens"
        if host_pages_min > geometry.pages(context_max):
            what = f"{sequences_max} sequences of {what} and less"
        needed = host_taken + bare.host_bytes + host_pages_min * host_page
        problems.append(
            f"{host_bytes:,} bytes of host memory are too little: {what} are {host_pages_min} pages of "
            f"{_size(host_page)} ({geometry.layers} layers), with {_size(bare.host_bytes + host_taken)} for "
            f"staging {needed:,} bytes")

    fewest = cells_min(geometry, rows_max, sequences_max)
    room = (pool_bytes - bare.pool_bytes) // WORKSPACE_ALIGNMENT * WORKSPACE_ALIGNMENT
    cells = room // geometry.page_bytes
    if cells < fewest:
        needed = pool_bytes  # a larger pool has a larger table
        while (smallest := with_pool(needed, fewest)).pool_bytes > needed:
            needed = smallest.pool_bytes
        bare = with_pool(needed, 0)
        largest = sorted(bare.workspaces, key=lambda workspace: -workspace.size)[:3]
        problems.append(
            f"a pool of {pool_bytes:,} bytes is too small: {fewest} cells of {_size(geometry.page_bytes)} are needed "
            f"(layers {geometry.layers}, sequences {sequences_max}, rows {rows_max}), and {_size(bare.pool_bytes)} for "
            f"workspaces ({', '.join(f'{workspace.name} {_size(workspace.size)}' for workspace in largest)}, ...), "
            f"together {needed:,} bytes; fewer rows per step or fewer sequences take less")
    if problems:
        raise ConfigError(problems)

    # More cells than pages there are would never be used; the cells for what a step fills may be on top.
    most = geometry.layers * host_pages + fewest - geometry.layers * sequences_max
    return evolve(bare, cells=min(cells, most), host_pages=host_pages)


def _size(size: int) -> str:
    """For people; a size that must be met is written out."""
    return f"{size / (1 << 20):,.1f} MiB" if abs(size) >= 1 << 20 else f"{size:,} bytes"
