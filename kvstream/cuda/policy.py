"""How many pages of each layer stay on the device, and how many cells are left for pages in transit: plain arithmetic.

Theory of operation. Each layer wants ``active_pages`` pages in every step. Of the pool's ``cells``, ``resident`` per
layer (on average) hold pages that stay; the rest is the *ring*, through which all other pages pass once per step. A
larger ring lets copies run further ahead of the computation, and costs residents, which means more copies. The answer
has three parts.

* The **target** for a context: the most residents with which the ring still holds ``ring_tenths`` / 10 times what one
  layer streams. With 11 tenths, a layer's pages can all be on their way while the layer before it computes. Nor need
  it hold more than the link carries in the time of one layer (``Feedback.lead``), if that is known: cells come free
  while a layer attends, so only the time in which none does has to be bridged. Each cell of a ring that is larger than
  that costs a resident page, hence a copy per step. That bound is ours, and with it the split
  follows it at once, since a change costs no more than it fetches; the rest is as in the work this descends from.
* The **decision**, once per step. A step of decode that crosses into a new page is where the target moves, so there
  the split jumps to it when too much is resident. So does the first step of any kind that streams after one in which
  everything had room: a long context may be there at once, loaded or forked. Otherwise feedback decides, slowly: pages
  that came late although the link had idle time are cured by a larger ring; a ring that is hardly used is given back.
  Pages that come late over a link that is busy all the time are *not* cured by a larger ring, which only adds to the
  traffic: without that gate, and without a floor one below the target, a saturated link would demote itself to nothing.
  After a change nothing but a crossing changes anything for ``COOLDOWN`` decisions.
* The **layout**. A prefill streams the same number of pages in every layer. In decode the same total is given out
  unevenly: few *split* layers stream, evenly spread, and the others are resident as a whole, so that the copies of a
  split layer have whole layers of computation to hide behind. No split layer streams more than the ring holds, if
  there are enough layers for that.

What a step's pages are is the caller's business; they must include all that the step reads and that may leave the
device, and none that may not (a growing page has a cell of its own, which is not among ``cells``). A change of split
invalidates nothing: the pages that are wanted before and after it stay where they are, the planner frees the others'
cells and fetches what is missing.

State is a frozen value: ``policy, split = policy.step(...)``.
"""

from __future__ import annotations

from attrs import evolve, field, frozen

DECODE_TOKENS_MAX = 32
"""Up to this many new tokens of a sequence, a step is one of decode: one token, or a draft that is verified."""

RING_CELLS_HINT = 8
"""What the ring is given at first, before the cells that do not divide among the layers."""

COOLDOWN = 64
STARVED_MIN, SPARE_MIN = 3, 8
"""Decisions in a row that must see the same before the ring grows, and before it shrinks."""

MISS_MAX = 0.01
BUSY_SATURATED = 0.80
BUSY_IDLE, PEAK_IDLE = 0.50, 0.50


@frozen
class Feedback:
    """What the transfers looked like.

    ``samples`` and ``misses`` only ever grow: batches of pages looked at, and those of them that came after the kernel
    that needed them could have begun. ``busy``: share of the last step in which a copy ran. ``peak``: the most cells of
    the ring in use, as a share of the ring. ``lead``: pages that the link carries while one layer computes; 0 where
    it is not known.
    """

    samples: int = 0
    misses: int = 0
    busy: float = 0.0
    peak: float = 0.0
    lead: int = 0


@frozen
class Split:
    """``layer_pages``: of each layer, how many of the step's first pages are to be resident. ``resident`` is the
    average that the policy steers; ``ring``: cells that are left for pages in transit."""

    resident: int
    ring: int
    layer_pages: tuple[int, ...]

    def streamed(self, active_pages: int) -> tuple[int, ...]:
        """Pages of each layer that pass through the ring in a step."""
        return tuple(max(0, active_pages - pages) for pages in self.layer_pages)


@frozen
class _Seen:
    """Feedback since the last decision, as shares."""

    miss: float
    busy: float
    peak: float


@frozen
class Policy:
    """Made by ``Policy.opened``. ``layout_pages``: the pages of the last step's decode layout, 0 after any other step.
    ``starved`` and ``spare`` count decisions in a row, ``cooldown`` those that must still pass. ``calm``: everything
    had room in the last step."""

    cells: int
    layers: int
    resident: int
    ring_min: int
    ring_tenths: int = 11
    layout_pages: int = 0
    starved: int = 0
    spare: int = 0
    cooldown: int = 0
    heard: Feedback = field(factory=Feedback)
    calm: bool = False

    @classmethod
    def opened(cls, cells: int, layers: int, ring_tenths: int = 11) -> Policy:
        """The split of a new pool: a small ring, and residents in whole layers' worth. With fewer cells than layers
        everything is ring."""
        if cells < 1 or layers < 1 or ring_tenths < 0:
            raise ValueError(f"a policy for {cells} cells, {layers} layers and {ring_tenths} tenths")
        hint = min(RING_CELLS_HINT, max(0, cells - layers))
        resident = (cells - hint) // layers
        if resident * layers == cells:  # pages that stream need a cell to pass through
            resident -= 1
        return cls(cells, layers, resident, cells - resident * layers, ring_tenths, calm=True)

    @property
    def ring(self) -> int:
        return self.cells - self.resident * self.layers

    def target(self, active_pages: int) -> int:
        """The most residents per layer that leave a ring of ``ring_tenths`` / 10 times a layer's streamed pages, or of
        what the link carries in the time of a layer, and no smaller than it was at first. 0 when there is no such
        number."""
        most = min(active_pages, (self.cells - self.ring_min) // self.layers)
        enough = min(most, (self.cells - self.heard.lead) // self.layers) if self.heard.lead > 0 else 0
        return max(enough, self._shared(active_pages, most))

    def _shared(self, active_pages: int, most: int) -> int:
        # cells - most * layers >= tenths / 10 * (active - most), solved for `most` where that is not yet true.
        lacking = self.ring_tenths * (active_pages - most) - 10 * (self.cells - most * self.layers)
        gain = 10 * self.layers - self.ring_tenths
        if lacking <= 0:
            return most
        if gain <= 0:  # one layer: giving up a resident page streams as much as it frees
            return 0
        return max(0, most - -(-lacking // gain))

    def step(self, active_pages: int, query_tokens: int, feedback: Feedback | None = None) -> tuple[Policy, Split]:
        """The split for a step, and the policy for the next one.

        *active_pages*: pages of each layer that the step reads and that may be streamed, counted once however many
        sequences share them. *query_tokens*: new tokens of the sequence that has most of them. *feedback*: None where
        nothing is known.
        """
        if active_pages <= self.resident or active_pages * self.layers <= self.cells:
            calm = evolve(self, layout_pages=0, starved=0, spare=0, heard=feedback or self.heard, calm=True)
            resident = max(active_pages, self.resident)
            return calm, Split(resident, self.cells - resident * self.layers, (resident,) * self.layers)
        layout_pages = active_pages if query_tokens <= DECODE_TOKENS_MAX else 0
        entering = self.calm or layout_pages not in (0, self.layout_pages)
        policy = evolve(self, layout_pages=layout_pages, calm=False)._decided(active_pages, entering, feedback)
        if self.calm and not layout_pages:  # the context grows with every step of a prompt: the next may decide anew
            policy = evolve(policy, cooldown=0)
        pages = policy._concentrated(active_pages) if layout_pages else (policy.resident,) * policy.layers
        return policy, Split(policy.resident, policy.ring, pages)

    # --- the decision -------------------------------------------------------------------------------------------------

    def _decided(self, active_pages: int, entering: bool, feedback: Feedback | None) -> Policy:
        policy, seen = self._listened(feedback)
        if seen is None and not entering:
            return policy
        target = policy.target(active_pages)
        floor = target - 1
        overfull = policy.resident > target
        is_over = policy.cooldown == 0
        policy = evolve(policy, cooldown=max(0, policy.cooldown - 1))
        if seen is not None:
            policy = policy._counted(seen, overfull, may_shrink=policy.resident > floor)
        if entering and overfull:
            return policy._repartitioned(target)
        if (is_over or policy.heard.lead > 0) and policy.resident < floor:
            return policy._repartitioned(floor)
        if is_over and policy.starved >= STARVED_MIN and policy.resident > 0:
            return policy._repartitioned(target if overfull else policy.resident - 1)
        if is_over and policy.spare >= SPARE_MIN and policy.resident < target:  # the target respects ring_min
            return policy._repartitioned(policy.resident + 1)
        return policy

    def _listened(self, feedback: Feedback | None) -> tuple[Policy, _Seen | None]:
        """What is new in the counters. Counters that cannot be true are a new beginning, and so is what was counted."""
        if feedback is None or feedback == self.heard:
            return self, None
        samples, misses = feedback.samples - self.heard.samples, feedback.misses - self.heard.misses
        policy = evolve(self, heard=feedback)
        if samples < 0 or not 0 <= misses <= samples:
            return evolve(policy, starved=0, spare=0), None
        if samples == 0:
            return policy, None
        return policy, _Seen(misses / samples, feedback.busy, feedback.peak)

    def _counted(self, seen: _Seen, overfull: bool, may_shrink: bool) -> Policy:
        late = seen.miss > MISS_MAX
        starving = may_shrink and late and seen.busy < BUSY_SATURATED
        spare = not late and seen.busy < BUSY_IDLE and seen.peak < PEAK_IDLE
        return evolve(self, starved=self.starved + 1 if overfull or starving else 0,
                      spare=self.spare + 1 if spare else 0)

    def _repartitioned(self, resident: int) -> Policy:
        return evolve(self, resident=resident, starved=0, spare=0, cooldown=COOLDOWN)

    # --- the layout ---------------------------------------------------------------------------------------------------

    def _concentrated(self, active_pages: int) -> tuple[int, ...]:
        """The decode layout: as many pages resident as with ``resident`` in every layer, in as many whole layers as the
        ring allows."""
        deficit = (active_pages - self.resident) * self.layers
        split = max(min(self.layers, -(-deficit // self.ring)), -(-deficit // active_pages))
        share, more = divmod(deficit, split)
        pages = [active_pages] * self.layers
        for index in range(split):
            pages[index * self.layers // split] -= share + (1 if index < more else 0)
        return tuple(pages)
