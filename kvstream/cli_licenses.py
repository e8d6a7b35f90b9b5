"""``kvstream licenses``: what KVStream is made with, and under which licences that may be passed on."""

from __future__ import annotations

import click

OWN_LINES = """\
KVStream is free software under the Apache License 2.0. It is made with the following, each under its own licence.
"""


@click.command(short_help="Show the licences of KVStream and what it is made with.")
@click.option("--short", is_flag=True, help="One line for each, without the texts.")
def licenses(short: bool) -> None:
    """Show the licences of KVStream and of everything that it is made with.

    The executable tells what is inside it, a KVStream that pip has installed what is installed beside it.
    """
    from . import licenses as collected

    text = collected.packed()
    if not text:
        text = OWN_LINES + "\n" + "\n".join(one.whole() for one in collected.notices(collected.needed()))
    if short:
        lines = text.splitlines()
        titles = [lines[at + 1] for at, line in enumerate(lines[:-2])
                  if line == lines[at + 2] == collected.RULE and lines[at + 1]]
        text = "\n".join(["KVStream: Apache-2.0", *titles])
    click.echo(text.rstrip("\n"))
