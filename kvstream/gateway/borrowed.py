"""An answer that stands before another one and tells what that one tells."""

from __future__ import annotations

from ..adapters.base import Adapter, UsageNumbers
from ..core.types import CountSource
from .ports import Answer


class Borrowed:
    """The facts of a :class:`ports.Answer`, as :attr:`source` has them at the moment they are asked for."""

    @property
    def source(self) -> Answer:
        raise NotImplementedError

    @property
    def adapter(self) -> Adapter:
        return self.source.adapter

    @property
    def count_source(self) -> CountSource:
        return self.source.count_source

    @property
    def tokens_prompt(self) -> int:
        return self.source.tokens_prompt

    @property
    def tokens(self) -> int:
        return self.source.tokens

    @property
    def usage(self) -> UsageNumbers | None:
        return self.source.usage

    @property
    def truncated(self) -> bool:
        return self.source.truncated

    @property
    def last_data(self) -> object:
        return self.source.last_data

    @property
    def granted(self) -> float | None:
        return self.source.granted
