"""Output that cannot be written: a full disk, a device that gave up. One sentence and exit code 1, for all commands."""

from __future__ import annotations

import contextlib
import errno
import os
import sys
from collections.abc import Iterator

import click

# What only writing fails with. A disk that is full where a file was to be written is told in the same words.
CANNOT_WRITE = frozenset((errno.ENOSPC, errno.EFBIG, errno.EIO, getattr(errno, "EDQUOT", errno.ENOSPC)))


def is_write_error(error: BaseException) -> bool:
    return isinstance(error, OSError) and error.errno in CANNOT_WRITE and error.filename is None


def sentence(error: OSError) -> str:
    return f"cannot write: {error.strerror or error}"


def let_go() -> None:
    """Forget what cannot be written: Python would try again at its end, say so, and exit with 120."""
    for stream in (sys.stdout, sys.stderr):
        try:
            if stream is not None:
                stream.flush()
        except (OSError, ValueError):
            with contextlib.suppress(OSError, ValueError):
                nowhere = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nowhere, stream.fileno())
                os.close(nowhere)


@contextlib.contextmanager
def told() -> Iterator[None]:
    """What was said is written when this ends, or it is said that it could not be."""
    try:
        try:
            yield
        finally:
            if sys.stdout is not None:
                sys.stdout.flush()
    except BrokenPipeError:  # the reader has had enough
        sys.exit(1)
    except OSError as error:
        with contextlib.suppress(OSError):
            click.echo(f"kvstream: {sentence(error)}", err=True)
        sys.exit(1)
    finally:
        let_go()
