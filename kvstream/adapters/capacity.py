"""Narrowing what a runtime reports by what the operator configured, with every correction in words."""

from __future__ import annotations

from attrs import define, field

from ..core.types import Limits, PoolMode
from .base import CapacityQuery, CapacityReport

SEATS_DEFAULT = 4
PAGES_DEFAULT = 2048


@define
class CapacityNotes:
    """Collects the words while limits are put together."""

    query: CapacityQuery
    lines: list[str] = field(factory=list)

    def add(self, line: str) -> None:
        self.lines.append(line)

    def narrowed(self, wanted: int | None, real: int | None, what: str, default: int) -> int:
        """The smaller of the configured and the real figure; the default when neither is known."""
        if wanted is None:
            return default if real is None else real
        if real is None or wanted <= real:
            return wanted
        self.add(f"{what}: {wanted} configured, but the runtime has {real}; using {real}")
        return real

    def pages_of(self, tokens: int) -> int:
        """Whole pages in a pool of ``tokens``. A pool below one page still gets one, or nothing could ever run."""
        pages = tokens // self.query.page_tokens
        if pages == 0:
            self.add(f"the pool of {tokens} tokens is below one page of {self.query.page_tokens}; counting one page")
        return max(1, pages)

    def report(
        self,
        *,
        mode: PoolMode,
        seats: int,
        pages: int,
        request_tokens_max: int | None,
        source: str,
        shares_prefix: bool = False,
        instance: str = "",
        process: str = "",
        settled: bool = True,
        slot_files: bool | None = None,
        context_varies: bool = False,
    ) -> CapacityReport:
        limits = Limits(
            mode=mode,
            seats=seats,
            pages=pages,
            page_tokens=self.query.page_tokens,
            request_tokens_max=request_tokens_max,
            shares_prefix=shares_prefix,
            host_pages=self.query.host_pages,
            source=source,
            context_varies=context_varies,
        )
        return CapacityReport(limits, tuple(self.lines), settled, process, slot_files, instance)


def smallest(*figures: int | None) -> int | None:
    """The smallest of the known figures; None when none is known."""
    known = [figure for figure in figures if figure is not None]
    return min(known) if known else None
