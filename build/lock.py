"""Writes the lists of exactly what goes into the executable and the zipapp, with hashes: ``just lock``.

    python build/lock.py

build/executable.lock: what KVStream needs, all of its extras that go into the executable, and PyInstaller.
build/zipapp.lock: what it needs, as far as it works without compiled parts.
build/release.lock: what writes the list of their parts, and is in neither.
build/compiled.lock: PyCUDA's source and what it is compiled with, for a build without a network (in_root.py).
build/executable-windows.lock, build/executable-macos.lock: the first for those systems (onedir.py).

The versions are those of the environment that runs this, so what ships is what was tested; pip tells the hashes. The
lists are for the Python that runs this, 3.11 for a release, and but for the last two for Linux on x86-64.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

from pip._vendor.packaging.requirements import Requirement
from pip._vendor.packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tests.cuda.driver.build import HEADERS, PYCUDA  # noqa: E402

PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
EXTRAS = PROJECT["optional-dependencies"]
BY_SOURCE = ("tomli",)  # its wheel is compiled; the zipapp takes the source
PYTHON = f"{sys.version_info[0]}.{sys.version_info[1]}"
PYINSTALLER = "pyinstaller==6.22.3"
CYCLONEDX = "cyclonedx-bom==7.5.0"
WHEEL = "wheel==0.48.0"  # PyCUDA's source asks for it
BATCH = 12
# Name, words for it, what wheels call it, and what is needed there only: pip asks markers of the system it runs on.
SYSTEMS = (
    ("windows", "Windows", ("win_amd64",), ("cffi", "pycparser", "colorama", "pefile", "pywin32-ctypes")),
    ("macos", "macOS on arm64", tuple(f"macosx_{version}_0_arm64" for version in (11, 12, 13, 14)), ("macholib",)),
)


def wanted_by_the_executable() -> list[str]:
    """PyCUDA is not among them: it is built from its source, and tests/cuda/driver/build.py pins it."""
    gguf = next(wanted for wanted in EXTRAS["test"] if wanted.startswith("gguf"))
    numpy = next(wanted for wanted in EXTRAS["cuda"] if wanted.startswith("numpy"))
    return [*PROJECT["dependencies"], *EXTRAS["embedded"], numpy, gguf]


def wanted_by_the_zipapp() -> list[str]:
    """zstd is compiled; without it request bodies may be gzip."""
    return [wanted for wanted in PROJECT["dependencies"] if not wanted.startswith("backports.zstd")]


def closure(wanted: list[str]) -> dict[str, str]:
    """Name to version of what is wanted and of what that needs, as it is installed here."""
    found: dict[str, str] = {}
    waiting = [(Requirement(text), "") for text in wanted]
    while waiting:
        requirement, extra = waiting.pop()
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": extra}):
            continue
        name = canonicalize_name(requirement.name)
        if name not in found:
            about = metadata.distribution(name)
            found[name] = about.version
            waiting += [(Requirement(text), "") for text in about.requires or ()]
    return found


def hashed(pins: list[str], *options: str) -> Iterator[str]:
    for start in range(0, len(pins), BATCH):
        with tempfile.NamedTemporaryFile(suffix=".json") as file:
            command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input", "--quiet", "install"]
            subprocess.run([*command, "--dry-run", "--ignore-installed", "--report", file.name, *options,
                            *pins[start:start + BATCH]], check=True)
            report = json.loads(Path(file.name).read_text("utf-8"))
        for one in report["install"]:
            about, archive = one["metadata"], one["download_info"]["archive_info"]
            yield f"{canonicalize_name(about['name'])}=={about['version']} --hash=sha256:{archive['hashes']['sha256']}"


def main() -> None:
    wheels = ("--only-binary", ":all:")
    executable = [f"{name}=={version}" for name, version in closure(wanted_by_the_executable()).items()]
    zipapp = closure(wanted_by_the_zipapp())
    sources = [f"{name}=={zipapp.pop(name)}" for name in BY_SOURCE]
    lines = {"executable": {*hashed(executable, "--no-deps", *wheels), *hashed([PYINSTALLER], *wheels)}}
    known = {line.partition(" ")[0]: line for line in lines["executable"]}
    lines["zipapp"] = {*(known[f"{name}=={version}"] for name, version in zipapp.items()),
                       *hashed(sources, "--no-deps", "--no-binary", ":all:")}
    lines["release"] = {*hashed([CYCLONEDX], *wheels)}
    lines["compiled"] = {*hashed([WHEEL, *HEADERS], "--no-deps", *wheels),
                         *hashed([f"pycuda=={PYCUDA}"], "--no-deps", "--no-binary", "pycuda")}
    systems = dict.fromkeys(lines, "Linux, x86-64")
    here = [line.partition(" ")[0] for line in lines["executable"]]
    for name, title, platforms, more in SYSTEMS:
        options = ["--no-deps", *wheels, "--target", "not-used", "--python-version", PYTHON]
        for platform in platforms:
            options += ["--platform", platform]
        systems[f"executable-{name}"] = title
        lines[f"executable-{name}"] = {*hashed([*here, *more], *options)}
    for name, found in lines.items():
        head = f"# Written by build/lock.py for Python {PYTHON}, {systems[name]}.\n"
        (ROOT / "build" / f"{name}.lock").write_text(head + "".join(f"{line}\n" for line in sorted(found)), "utf-8")
        print(f"{name}.lock: {len(found)} packages")


if __name__ == "__main__":
    main()
