"""The watch over options that take turns."""

from __future__ import annotations

from kvstream.gateway.load_options import MODELS_MAX, LoadOptionsWatch
from kvstream.gateway.statusview import _alternating


def test_it_says_which_and_how_often_the_worst_first() -> None:
    watch = LoadOptionsWatch()
    for i in range(6):
        watch.look("a:latest", f"num_ctx={i % 2}")
        watch.look("b:latest", "" if i < 4 else "num_ctx=1")
    for options in ("x", "y", "x"):
        watch.look(f"c:7b {options}", options)
    assert [(row["model"], row["changes"], row["options"]) for row in watch.status()] == [
        ("a:latest", 5, ["num_ctx=0", "num_ctx=1"]), ("c:7b", 2, ["x", "y"])]
    assert "5 times in 6 requests" in watch.status()[0]["warning"]
    assert "5 times in 6 requests" in _alternating(watch.status())[0].plain  # type: ignore[union-attr]


def test_it_remembers_a_bounded_number_of_models() -> None:
    watch = LoadOptionsWatch()
    for i in range(3 * MODELS_MAX):
        for options in ("a", "b", "a"):
            watch.look(f"m{i}", options)
    assert len(watch.status()) == MODELS_MAX and watch.status()[0]["model"] == f"m{2 * MODELS_MAX}"
