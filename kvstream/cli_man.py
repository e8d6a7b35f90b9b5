"""``kvstream man``: the manual page, made from the command line itself.

Every command that --help shows has a part, every option its line with the words of its own help. What an option does
is therefore said once, in ``cli*``.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator

import click

from . import __version__

DESCRIPTION = """\
KVStream stands in front of the model runtime on this machine and speaks OpenAI's API. It lets a request in when its
prompt and its answer have room in the runtime's KV memory; everyone else waits in an ordered queue.
"""
FILES = (
    ("./kvstream.toml", "The configuration, unless --config names one; all keys: kvstream check-config --template."),
    ("~/.local/state/kvstream/", "Logs and saved KV of the llama.cpp server that KVStream starts itself."),
    ("~/.cache/kvstream/", "Where the one-file executable unpacks itself, once per release. May be deleted."),
)
VARIABLES = (
    ("KVSTREAM_SECTION__KEY", "Sets section.key of the configuration."),
    ("KVSTREAM_KEY", "The API key that status, health and models show to a KVStream that wants one."),
    ("KVSTREAM_TRACEBACK", "Set it to see where an unexpected error came from."),
    ("KVSTREAM_CACHE_DIR", "The folder where the one-file executable unpacks itself, and the only one it will try."),
)
CODES = (
    ("0", "Done."), ("1", "Anything that the others do not name."),
    ("2", "The configuration or the command line is wrong."), ("3", "The port is in use."),
    ("4", "bench: an open loop offered more than was served."),
    ("126", "The one-file executable is damaged, or found no place to unpack itself to."),
    ("130", "Stopped by Ctrl-C before the demo's chat or the bench was over."),
)


def commands(group: click.Group, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], click.Command]]:
    """Every visible command with its words, groups before what is in them."""
    for name, command in group.commands.items():
        if command.hidden:
            continue
        yield (*path, name), command
        if isinstance(command, click.Group):
            yield from commands(command, (*path, name))


def escaped(text: str) -> str:
    lines = [line.replace("\\", "\\e").replace("-", "\\-") for line in text.splitlines()]
    return "\n".join("\\&" + line if line[:1] in (".", "'") else line for line in lines)


def paragraphs(command: click.Command) -> Iterator[str]:
    """The help, as roff. A paragraph that begins with click's backspace keeps its lines."""
    for paragraph in inspect.cleandoc(command.help or "").split("\n\n"):
        if paragraph.startswith("\b"):
            yield ".PP\n.nf\n" + escaped(paragraph[1:].strip("\n")) + "\n.fi"
        elif paragraph.strip():
            yield ".PP\n" + escaped(" ".join(paragraph.split()))


def rows(context: click.Context) -> Iterator[str]:
    """Arguments have no help of their own; they stand in the line of usage."""
    for parameter in context.command.get_params(context):
        record = parameter.get_help_record(context)
        if record is not None:
            yield f".TP\n.B {escaped(record[0])}\n{escaped(record[1]) or '.br'}"


def page(main: click.Group, version: str) -> str:
    root = click.Context(main, info_name="kvstream", **main.context_settings)
    parts = [f'.TH KVSTREAM 1 "" "KVStream {version}" "User Commands"', ".SH NAME",
             f"kvstream \\- {escaped((main.help or '').strip().rstrip('.'))}", ".SH SYNOPSIS"]
    found = list(commands(main))
    for path, command in found:
        context = _context(root, main, path)
        usage = " ".join(command.collect_usage_pieces(context))
        parts.append(f".B kvstream {escaped(' '.join(path))}\n{escaped(usage)}\n.br")
    parts += [".SH DESCRIPTION", escaped(" ".join(DESCRIPTION.split())), ".SH OPTIONS", *rows(root), ".SH COMMANDS"]
    for path, command in found:
        parts += [f'.SS "kvstream {" ".join(path)}"', *paragraphs(command), *rows(_context(root, main, path))]
    for title, table in (("ENVIRONMENT", VARIABLES), ("FILES", FILES), ("EXIT STATUS", CODES)):
        parts.append(f".SH {title}")
        parts += [f".TP\n.B {escaped(name)}\n{escaped(words)}" for name, words in table]
    return "\n".join(parts) + "\n"


def _context(root: click.Context, main: click.Group, path: tuple[str, ...]) -> click.Context:
    context, command = root, main
    for name in path:
        found = command.commands[name]
        context = click.Context(found, info_name=name, parent=context)
        if isinstance(found, click.Group):
            command = found
    return context


@click.command(short_help="Print the manual page.")
@click.pass_context
def man(ctx: click.Context) -> None:
    """Print the manual page: kvstream man | man -l -

    To keep it, write it into a file kvstream.1 in a folder man1 that man looks into.
    """
    whole = ctx.find_root().command
    assert isinstance(whole, click.Group)
    click.echo(page(whole, __version__), nl=False)
