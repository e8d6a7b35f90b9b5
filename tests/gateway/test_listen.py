"""Addresses that cannot be listened on: which fault it is, and whether another start may help."""

from __future__ import annotations

import errno
import os
import socket
import sys

import pytest

from kvstream.errors import ConfigError, KVStreamError, PortInUseError
from kvstream.gateway.connections import cannot_listen, open_sockets


@pytest.mark.parametrize(("number", "kind", "word"), [
    (errno.EADDRINUSE, PortInUseError, "Another program"),
    (errno.EADDRNOTAVAIL, KVStreamError, "an address or a name of this machine"),
    (errno.EAFNOSUPPORT, KVStreamError, "an address or a name of this machine"),
    (errno.EACCES, PortInUseError if sys.platform == "win32" else ConfigError, "port"),
])
def test_what_is_wrong_with_an_address(number: int, kind: type[KVStreamError], word: str) -> None:
    said = cannot_listen("10.9.8.7", 80, OSError(number, os.strerror(number)))
    assert type(said) is kind and word in said.message and os.strerror(number) in said.message


def test_real_ones() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(PortInUseError, match="Another program"):
        open_sockets("127.0.0.1", taken.getsockname()[1])
    for host in ("192.0.2.1", "a..b"):  # TEST-NET-1: nobody's address; and no name that could be looked up
        with pytest.raises(KVStreamError, match=r"server\.host") as found:
            open_sockets(host, 0)
        assert type(found.value) is KVStreamError
