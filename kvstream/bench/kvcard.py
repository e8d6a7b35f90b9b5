"""The streamer's own cache on a card that is not there: ``FakeDevice`` in virtual time, with a profile's constants.

Nothing is stored and no value is computed: what runs is the policy, the planner and the executor of ``kvstream/cuda``,
as they run on a GPU, and every copy, launch and wait takes the time that the profile says. What an engine computes
between two attentions is one launch of the right length on the stream on which the cache reads its inputs.

The host takes time as well: every call to the driver costs it ``CALL_S``.
"""

from __future__ import annotations

from collections.abc import Callable

from ..cuda.fake_device import FakeDevice, Launch, Speeds
from ..cuda.layout import Layout
from ..cuda.policy import Split
from .kvmodel import GIB, Model, Profile
from .kvrun import Inputs, Run

CALL_S = 5e-6  # a call through PyCUDA
WAVE_S = 2e-6
"""A wave of attention beside its pages, from the second of a layer on. The constants are fitted to whole tokens of the
original, which launches attention once per layer too: what that costs, and all other launches, is in them already."""
SOMEWHERE = 1 << 40  # inputs lie on the device, as an engine's do
LAYER = "model_layer"


class Card(Run):
    """A simulated card with a cache in it."""

    def __init__(self, profile: Profile, model: Model, layout: Layout,
                 split: Callable[[int], Split] | None = None) -> None:
        self.profile, self.model = profile, model
        self._wave_s = 0.0  # what the next wave costs beside its pages
        self._page_s = self._layer_s = 0.0  # the attention of one page, and all else of a layer, in the step at hand
        speeds = Speeds(
            in_bytes_per_s=profile.h2d_gib_s * GIB, out_bytes_per_s=profile.h2d_gib_s * GIB,
            copy_s=profile.call_ms / 1e3, launch_s=0.0, call_s=CALL_S, kernel_s=self._kernel_s)
        self._fake = FakeDevice(None, speeds=speeds, memory_bytes=1 << 50, pinned_bytes=1 << 50)
        super().__init__(self._fake, layout, Inputs(SOMEWHERE, SOMEWHERE, SOMEWHERE, SOMEWHERE), split)

    def _now(self) -> float:
        return self._fake.host_s

    def _mark(self) -> float:
        return self._fake.device_s

    def _between(self, begun: float, ended: float) -> float:
        return (ended - begun) * 1e3

    def _enter(self, tokens: int) -> float:
        other_ms, attention_ms = self.profile.decode_ms(self.model), self.profile.attention_ms(
            self.model, self.tokens + 1)
        if tokens > 1:
            other_ms, attention_ms = self.profile.prefill_step_ms(self.model, tokens, self.tokens + tokens / 2)
        pages = -(-(self.tokens + tokens) // self._page_tokens)
        self._page_s = attention_ms / 1e3 / self._layers / pages
        self._layer_s = other_ms / 1e3 / self._layers
        return other_ms + attention_ms

    def _work(self, tokens: int) -> None:
        self._wave_s = 0.0
        self._fake.launch(self._cache.compute, LAYER, (1,), (1,), (self._layer_s,))

    def _kernel_s(self, launch: Launch) -> float:
        if launch.kernel == LAYER:
            return float(launch.args[0])
        if launch.kernel.startswith(("kv_attend", "kv_wide")):
            k_pages, v_pages = launch.args[1:3]  # one list of addresses after the other
            before, self._wave_s = self._wave_s, WAVE_S
            return before + self._page_s * (v_pages - k_pages) / 8
        return 0.0
