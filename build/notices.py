"""The licences of everything in a bundle, as one file for ``kvstream licenses``.

    python build/notices.py FOLDER FILE

Run by the Python of the build's environment, whose distributions are those in the bundle, once FOLDER (what PyInstaller
collected) is there: the system's libraries in it are looked up by name, and their packages' copyright files taken
(Debian's, by dpkg). A library whose licence is not found is an error: it would be passed on without it.
"""

from __future__ import annotations

import re
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# In the environment, not in the bundle; PyInstaller's own licence is there for its bootloader.
TOOLS = frozenset(("pip", "setuptools", "wheel", "altgraph", "packaging", "pyinstaller-hooks-contrib", "kvstream",
                   "requests", "urllib3", "charset-normalizer", "pygments", "markdown-it-py", "mdurl"))
IN_THE_LAUNCHER = {"libc.a": "glibc", "libzstd.a": "zstd"}
SAID = ("KVStream is free software under the Apache License 2.0. With it in this file, each under its own licence:\n")


# The wheel does not bring it.
LLAMA = ("llama.cpp (in xllamacpp): MIT", (ROOT / "build" / "licences" / "llama.cpp.txt").read_text("utf-8"))


def distributions() -> list[str]:
    names = {found.metadata["Name"].lower().replace("_", "-") for found in metadata.distributions()}
    return sorted(names - TOOLS)


def python_notice() -> tuple[str, str]:
    text = (Path(sysconfig.get_path("stdlib")) / "LICENSE.txt").read_text("utf-8")
    return f"Python {sys.version.split()[0]}: PSF-2.0", text


def system_libraries(folder: Path) -> list[str]:
    """Libraries that came from the system and not with a wheel: they lie at the top. Python's own is not one."""
    return sorted(path.name for path in (folder / "_internal").glob("lib*.so*")
                  if not path.is_symlink() and not path.name.startswith("libpython"))


def package_of(library: str) -> str:
    """Debian's name of the package that has a library. *Errors*: ``LookupError``."""
    done = subprocess.run(["dpkg", "-S", f"*/{library}"], capture_output=True, text=True, check=False)
    for line in done.stdout.splitlines():
        names, _, path = line.partition(": ")
        if Path(path).name == library and "/lib" in path and not path.startswith("/usr/share"):
            return names.partition(":")[0].partition(",")[0]
    raise LookupError(f"no package has {library}")


def system_notices(names: list[str]) -> Iterator[tuple[str, str]]:
    by_package: dict[str, list[str]] = {}
    for name in names:
        by_package.setdefault(package_of(name), []).append(name)
    for package, inside in sorted(by_package.items()):
        copyright_file = Path("/usr/share/doc") / package / "copyright"
        version = subprocess.run(["dpkg-query", "-W", "-f", "${Version}", package], capture_output=True, text=True,
                                 check=True).stdout
        yield f"{package} {version}: see below ({', '.join(inside)})", copyright_file.read_text("utf-8")


def main() -> None:
    sys.path.insert(0, str(ROOT))
    from kvstream.licenses import RULE, notices

    folder, into = Path(sys.argv[1]), Path(sys.argv[2])
    parts = [SAID, *(notice.whole() for notice in notices(distributions()))]
    try:
        others = [python_notice(), LLAMA, *system_notices([*system_libraries(folder), *IN_THE_LAUNCHER])]
    except LookupError as error:
        sys.exit(f"{error}: its licence is not known")
    parts += [f"{RULE}\n{title}\n{RULE}\n\n{text.strip()}\n" for title, text in others]
    text = "\n".join(parts)
    if unnamed := re.findall(rf"(?m)^{RULE}\n(.*: )\n", text):
        sys.exit(f"without a licence: {unnamed}")
    into.write_text(text, "utf-8")


if __name__ == "__main__":
    main()
