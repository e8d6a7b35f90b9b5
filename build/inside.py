"""What is inside the things that are shipped: the one file, PyInstaller's folder, its program, the zipapp.

Opens each of them member by member: same.py compares the members of two builds, notices.py and sbom.py ask which
distributions the modules in a folder came from. Nobody keeps a list of what is shipped by hand.
"""

from __future__ import annotations

import io
import re
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

from pack import FOOTER, MAGIC, PROGRAM, decompressed

EXTENSION = re.compile(r"\.(cpython-[\w-]+|abi3)\.so$|\.so$|(\.cp\d+-\w+)?\.pyd$")


class Unknown(Exception):
    """Something is inside that nobody knows to have put there."""


def one_file(body: bytes) -> Iterator[tuple[str, bytes]]:
    """The launcher, the footer and each file of the archive behind it."""
    footer = body[-FOOTER.size:]
    head, packed, _raw, _files, _size, is_zstd, _glibc, _digest, _check, _magic = FOOTER.unpack(footer)
    yield "(launcher)", body[:head]
    yield "(footer)", footer
    archive = body[head:head + packed]
    with tarfile.open(fileobj=io.BytesIO(decompressed(archive) if is_zstd else archive)) as tar:
        for member in tar:
            opened = tar.extractfile(member) if member.isreg() else None
            about = f"{member.type!r} {member.mode:o} {member.linkname}".encode()
            yield member.name, about + b"\n" + (opened.read() if opened is not None else b"")


def zip_file(body: bytes) -> Iterator[tuple[str, bytes]]:
    with zipfile.ZipFile(io.BytesIO(body)) as archive:
        for member in archive.infolist():
            yield member.filename, f"{member.date_time} {member.external_attr:o}\n".encode() + archive.read(member)


def program(path: Path) -> Iterator[tuple[str, bytes]]:
    """PyInstaller's program: its own scripts, and every module. Needs PyInstaller."""
    from PyInstaller.archive.readers import CArchiveReader

    archive = CArchiveReader(str(path))
    for name, entry in archive.toc.items():
        if entry[4] == "z":
            modules = archive.open_embedded_archive(name)
            for module in modules.toc:
                yield module, modules.extract(module, raw=True) or b""
        else:
            yield f"({name})", archive.extract(name)


def members(path: Path) -> dict[str, bytes]:
    """By name; empty for what cannot be opened here."""
    body = path.read_bytes()
    if body[-len(MAGIC):] == MAGIC:
        return dict(one_file(body))
    if zipfile.is_zipfile(io.BytesIO(body)):
        return dict(zip_file(body))
    if path.name == PROGRAM:
        try:
            return dict(program(path))
        except ImportError:  # no PyInstaller here
            return {}
    return {}


# --- which distributions ----------------------------------------------------------------------------------------------


def modules(folder: Path) -> set[str]:
    """Every importable name in PyInstaller's folder, with dots; namespace packages left out."""
    own = folder / f"{PROGRAM}.exe" if sys.platform == "win32" else folder / PROGRAM
    found = {name for name, body in program(own) if not name.startswith("(") and body}
    internal = folder / "_internal"
    for path in (path for ending in ("so", "pyd") for path in internal.rglob(f"*.{ending}")):
        parts = path.relative_to(internal).parts
        if not path.is_symlink() and parts[0] not in ("python3.11", "lib-dynload") and not parts[0].endswith(".libs"):
            found.add(".".join((*parts[:-1], EXTENSION.sub("", parts[-1]))).removesuffix(".__init__"))
    return found


def owners() -> dict[str, str]:
    """Module to the name of the distribution that has it, in the environment of the Python that runs this."""
    found: dict[str, str] = {}
    for distribution in metadata.distributions():
        name = distribution.metadata["Name"]
        for line in (distribution.read_text("RECORD") or "").splitlines():
            path = line.partition(",")[0]
            if path.endswith((".py", ".so", ".pyd")):
                module = EXTENSION.sub("", path).removesuffix(".py").removesuffix("/__init__")
                found.setdefault(module.replace("/", "."), name)
    return found


def distributions(folder: Path) -> list[str]:
    """Those that the folder has at least one module of, and PyInstaller, whose program it is. *Errors*: ``Unknown``."""
    known, found, strange = owners(), {"pyinstaller"}, []
    for module in modules(folder):
        top = module.partition(".")[0]
        if module in known:
            found.add(known[module])
        elif top not in sys.stdlib_module_names and top != "kvstream" and not top.startswith("_sysconfigdata"):
            strange.append(module)
    if strange:
        raise Unknown(f"nobody knows where these come from: {', '.join(sorted(strange))}")
    return sorted(found, key=str.lower)


# What compilers leave in a library of the places where its sources lay.
SOURCES = (re.compile(rb"/index\.crates\.io-[0-9a-f]+/([a-z][\w-]*?)-(\d+\.\d+[\w.+]*)/"),
           re.compile(rb"/rust/deps/([a-z][\w-]*?)-(\d+\.\d+[\w.+]*)/"),
           re.compile(rb"/_deps/([\w.-]+)-src()/"),
           re.compile(rb"/llama\.cpp/vendor/([a-z][\w-]+)()/"))


def compiled_in(library: Path) -> list[tuple[str, str]]:
    """Other people's work that a library was compiled from, as far as it says so: (name, version), where a version may
    be empty, and a name may have several."""
    body = library.read_bytes()
    return sorted({(name.decode(), version.decode()) for source in SOURCES for name, version in source.findall(body)})
