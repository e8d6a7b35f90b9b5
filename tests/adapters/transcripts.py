"""Golden transcripts on disk, and events as plain JSON to compare them with."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from attrs import frozen

from kvstream.adapters import ADAPTERS
from kvstream.adapters.base import Delta, Done, Failed, HttpReply, ProxyRequest, UpstreamEvent, Usage

GOLDEN = Path(__file__).parent / "golden"
_SHOWN = (
    "tokens",
    "text",
    "total",
    "cached",
    "processed",
    "standalone",
    "reason",
    "index",
    "synthesised",
    "unfinished",
)


def request_of(described: Mapping[str, Any]) -> ProxyRequest:
    """A client's request as the gateway would read it."""
    view = described["body"]
    options = view.get("stream_options") or {}
    return ProxyRequest(
        route=described["route"],
        body=json.dumps(view, ensure_ascii=False).encode("utf-8"),
        view=view,
        model=view.get("model", ""),
        stream=bool(view.get("stream")),
        include_usage=bool(options.get("include_usage")),
    )


@frozen
class Transcript:
    """One case: what was asked, what came back, and which events that is."""

    backend: str
    case: str
    folder: Path
    meta: dict[str, Any]
    response: bytes
    request: ProxyRequest | None

    @property
    def reply(self) -> HttpReply:
        return HttpReply(self.meta["status"], self.meta["headers"], self.response)

    @property
    def adapter(self) -> Any:
        return ADAPTERS[self.backend]("http://backend.example:1")

    @property
    def expected(self) -> Any:
        return json.loads((self.folder / "expected.json").read_text(encoding="utf-8"))

    @property
    def is_stream(self) -> bool:
        return self.request is not None and self.meta["status"] == 200

    def decode(self, pieces: Iterable[bytes]) -> list[UpstreamEvent]:
        assert self.request is not None
        decoder = self.adapter.decoder(self.request, content_type=self.meta["headers"].get("content-type", ""))
        events = [event for piece in pieces for event in decoder.feed(piece)]
        return events + decoder.finish()


def load(folder: Path) -> Transcript:
    asked = folder / "request.json"
    request = request_of(json.loads(asked.read_text(encoding="utf-8"))) if asked.exists() else None
    meta = json.loads((folder / "meta.json").read_text(encoding="utf-8"))
    return Transcript(folder.parent.name, folder.name, folder, meta, (folder / "response.bin").read_bytes(), request)


def load_all(root: Path = GOLDEN) -> list[Transcript]:
    return [load(path.parent) for path in sorted(root.glob("*/*/meta.json"))]


def streams(backend: str = "*") -> list[Transcript]:
    return [case for case in load_all() if case.is_stream and backend in ("*", case.backend)]


def shown(event: UpstreamEvent) -> dict[str, Any]:
    """An event for ``expected.json``: bytes as their number, defaults left out."""
    plain: dict[str, Any] = {"event": type(event).__name__}
    if raw := getattr(event, "raw", b""):
        plain["bytes"] = len(raw)
    if isinstance(event, Failed):
        return {**plain, "kind": event.kind, "status": event.status, "message": event.message}
    if isinstance(event, Usage):
        numbers = event.numbers
        plain |= {"prompt": numbers.prompt, "completion": numbers.completion, "cached": numbers.cached}
    return plain | {name: value for name in _SHOWN if (value := getattr(event, name, None))}


def observed(case: Transcript) -> Any:
    """What ``expected.json`` of a case should hold."""
    if case.is_stream:
        return [shown(event) for event in case.decode([case.response])]
    if case.meta["status"] >= 400:
        return shown(case.adapter.error(case.reply))
    return None


def expect_all(root: Path) -> None:
    """Write every ``expected.json``. Read the difference before you commit it."""
    for case in load_all(root):
        expected = observed(case)
        if expected is not None:
            lines = expected if isinstance(expected, list) else [expected]
            text = ",\n ".join(json.dumps(line, ensure_ascii=False) for line in lines)
            text = f"[{text}]\n" if isinstance(expected, list) else f"{text}\n"
            (case.folder / "expected.json").write_text(text, encoding="utf-8")


def forwarded(events: Iterable[UpstreamEvent]) -> bytes:
    """All bytes that would reach a client that takes everything."""
    return b"".join(getattr(event, "raw", b"") for event in events if not is_synthetic(event))


def is_synthetic(event: UpstreamEvent) -> bool:
    return isinstance(event, Done) and event.synthesised


def texts(events: Iterable[UpstreamEvent]) -> str:
    return "".join(event.text for event in events if isinstance(event, Delta))
