"""What completion offers for the value of an option whose type it is not: an option's own rules stay what they are.

Most values are checked by the configuration, together with everything else that is wrong, and a file may be one that
is yet to be written. A `click.Path` or `click.Choice` would check them earlier, and by other rules.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, get_args, get_origin

import click
from click.shell_completion import CompletionItem

CONFIG_HELP = "TOML file instead of ./kvstream.toml."

Offer = Callable[[click.Context, click.Parameter, str], list[CompletionItem]]


def files(_ctx: click.Context, _param: click.Parameter, typed: str) -> list[CompletionItem]:
    """Names of files, which the shell finds itself."""
    return [CompletionItem(typed, type="file")]


def folders(_ctx: click.Context, _param: click.Parameter, typed: str) -> list[CompletionItem]:
    return [CompletionItem(typed, type="dir")]


def words(*known: str, or_files: bool = False) -> Offer:
    """Those that begin with what was typed, small or capital."""

    def offer(ctx: click.Context, param: click.Parameter, typed: str) -> list[CompletionItem]:
        found = [CompletionItem(word) for word in known if word.lower().startswith(typed.lower())]
        return found + (files(ctx, param, typed) if or_files and not found else [])

    return offer


def words_of(kind: Any) -> tuple[str, ...]:
    """The words that a key of the configuration may be, from its type."""
    if get_origin(kind) is Literal:
        return tuple(get_args(kind))
    return tuple(word for part in get_args(kind) for word in words_of(part))


def config_option(command: Callable[..., Any]) -> Any:
    """``--config``, as most commands have it."""
    return click.option("--config", metavar="PATH", shell_complete=files, help=CONFIG_HELP)(command)
