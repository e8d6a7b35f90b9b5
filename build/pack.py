"""A folder and a launcher become one file. The same folder gives the same bytes, wherever and whenever.

    python build/pack.py FOLDER LAUNCHER FILE [--plain] [--glibc 2.31]

The file is the launcher, the archive, and 144 bytes of footer; launcher/launcher.c reads the same layout. The archive
is a ustar of the folder, sorted, without owners and times, compressed by zstd with its checksum (``--plain``: not at
all, for launchers that were built without zstd). Its name in the cache is the hash of the uncompressed archive: it
changes when the contents do, and only then.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import struct
import sys
import tarfile
from pathlib import Path
from typing import Any

PROGRAM = "kvstream"
MAGIC = b"KVSTREAM-PACK-3\0"
FACTS, FOOTER = struct.Struct("<7Q64s"), struct.Struct("<7Q64sQ16s")
LEVEL = 19
NAME_BYTES_MAX = 250


class Unpackable(Exception):
    """The folder holds something that the launcher could not make."""


def archive(folder: Path) -> tuple[bytes, int, int]:
    """(the ustar, how many files and links, bytes of the files)."""
    if not (folder / PROGRAM).is_file():
        raise Unpackable(f"{folder} has no {PROGRAM} to start")
    into, files, size = io.BytesIO(), 0, 0
    with tarfile.open(fileobj=into, mode="w", format=tarfile.USTAR_FORMAT) as tar:
        for path in sorted(folder.rglob("*")):
            entry = tarfile.TarInfo(path.relative_to(folder).as_posix())
            if len(entry.name.encode()) > NAME_BYTES_MAX:
                raise Unpackable(f"the name {entry.name} is too long")
            if path.is_symlink():
                entry.type, entry.linkname = tarfile.SYMTYPE, path.readlink().as_posix()
                inside = (path.parent / entry.linkname).resolve().is_relative_to(folder.resolve())
                if not inside or len(entry.linkname.encode()) > 100:
                    raise Unpackable(f"the link {entry.name} leads to {entry.linkname}")
                files += 1
                tar.addfile(entry)
            elif path.is_dir():
                entry.type, entry.mode = tarfile.DIRTYPE, 0o755
                tar.addfile(entry)
            elif path.is_file():
                entry.mode = 0o755 if path.stat().st_mode & 0o100 else 0o644
                entry.size = path.stat().st_size
                files, size = files + 1, size + entry.size
                with path.open("rb") as opened:
                    tar.addfile(entry, opened)
            else:
                raise Unpackable(f"{entry.name} is neither a file nor a folder nor a link")
    return into.getvalue(), files, size


def _zstd() -> Any:
    if sys.version_info >= (3, 14):
        from compression import zstd
    else:
        from backports import zstd
    return zstd


def compressed(raw: bytes, level: int = LEVEL) -> bytes:
    zstd = _zstd()
    options = {zstd.CompressionParameter.compression_level: level, zstd.CompressionParameter.checksum_flag: 1}
    return bytes(zstd.compress(raw, options=options))


def decompressed(body: bytes) -> bytes:
    return bytes(_zstd().decompress(body))


def footer_of(*facts: int | bytes) -> bytes:
    """With FNV-1a of the facts, and what tells the launcher that the file is whole."""
    body, check = FACTS.pack(*facts), 0xCBF29CE484222325
    for byte in body:
        check = (check ^ byte) * 0x100000001B3 % 2**64
    return body + check.to_bytes(8, "little") + MAGIC


def pack(folder: Path, launcher: Path, file: Path, plain: bool = False, level: int = LEVEL, glibc: int = 0) -> str:
    """Writes the file; its hash is returned. ``glibc``: the N of the 2.N without which the launcher refuses to unpack
    it, or 0 where that is not known. *Errors*: ``Unpackable``."""
    raw, files, size = archive(folder)
    head, body = launcher.read_bytes(), raw if plain else compressed(raw, level)
    digest = hashlib.sha256(raw).hexdigest()
    footer = footer_of(len(head), len(body), len(raw), files, size, not plain, glibc, digest.encode())
    file.write_bytes(head + body + footer)
    file.chmod(0o755)
    return digest


def main() -> None:
    parser = argparse.ArgumentParser(description="A folder and a launcher become one file.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("launcher", type=Path)
    parser.add_argument("file", type=Path)
    parser.add_argument("--plain", action="store_true")
    parser.add_argument("--glibc", default="2.0", help="without this version the launcher refuses to unpack it")
    given = parser.parse_args()
    try:
        digest = pack(given.folder, given.launcher, given.file, given.plain, glibc=int(given.glibc.split(".")[1]))
    except Unpackable as error:
        sys.exit(str(error))
    print(f"{given.file}: {given.file.stat().st_size / 1e6:.1f} MB, {digest[:32]}")


if __name__ == "__main__":
    main()
