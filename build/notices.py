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
from pathlib import Path

import inside

ROOT = Path(__file__).resolve().parents[1]
IN_THE_LAUNCHER = {"libc.a": "glibc", "libzstd.a": "zstd"}
SAID = "KVStream is free software under the Apache License 2.0:"
WITH_IT = "With it in this file, each under its own licence:"
# What programs and wheels have inside and do not bring the licence of.
LICENCES = ROOT / "build" / "licences"


def head() -> str:
    return f"{SAID}\n\n{(ROOT / 'LICENSE').read_text('utf-8').strip()}\n\n{WITH_IT}\n"


def python_notice() -> tuple[str, str]:
    places = (Path(sysconfig.get_path("stdlib")) / "LICENSE.txt", Path(sys.base_prefix) / "LICENSE.txt",  # Windows
              Path("/usr/share/doc") / f"python{sys.version_info[0]}.{sys.version_info[1]}" / "copyright")  # Debian
    text = next(place for place in places if place.is_file()).read_text("utf-8")
    return f"Python {sys.version.split()[0]}: PSF-2.0", f"{text}\n\n{(LICENCES / 'python.txt').read_text('utf-8')}"


def llama_notice(folder: Path) -> tuple[str, str]:
    """*Errors*: ``LookupError`` when the library has something compiled in whose licence is not in our file."""
    text = (LICENCES / "llama.cpp.txt").read_text("utf-8")
    for library in (folder / "_internal" / "xllamacpp").glob("*.so"):
        for name, _version in inside.compiled_in(library):
            if not re.search(rf"(?<![\w-]){re.escape(name)}(?![\w-])", text):
                raise LookupError(f"{name} is compiled into {library.name}, and build/licences/llama.cpp.txt lacks it")
    return "llama.cpp (in xllamacpp): MIT", text


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


def package_version(package: str) -> str:
    return subprocess.run(["dpkg-query", "-W", "-f", "${Version}", package], capture_output=True, text=True,
                          check=True).stdout


def system_notices(names: list[str]) -> Iterator[tuple[str, str]]:
    by_package: dict[str, list[str]] = {}
    for name in names:
        by_package.setdefault(package_of(name), []).append(name)
    for package, files in sorted(by_package.items()):
        text = (Path("/usr/share/doc") / package / "copyright").read_text("utf-8")
        yield f"{package} {package_version(package)}: see below ({', '.join(files)})", text


def notices_elsewhere(folder: Path) -> Iterator[tuple[str, str]]:
    """Of the libraries beside Python where there is no dpkg. Windows' Python has them in its own licence file."""
    for path in sorted((folder / "_internal").glob("*.dylib")):
        if not path.name.startswith(("libssl", "libcrypto", "libpython")):
            raise LookupError(path.name)
    if sys.platform == "darwin":
        yield "OpenSSL 3: Apache-2.0", "Copyright (c) The OpenSSL Project Authors. The text is at the top of this file."


def main() -> None:
    sys.path.insert(0, str(ROOT))
    from kvstream.licenses import RULE, notices

    folder, into = Path(sys.argv[1]), Path(sys.argv[2])
    try:
        parts = [head(), *(notice.whole() for notice in notices(inside.distributions(folder)))]
        others = [python_notice(), llama_notice(folder)]
        others += (system_notices([*system_libraries(folder), *IN_THE_LAUNCHER]) if sys.platform == "linux"
                   else notices_elsewhere(folder))
    except (LookupError, inside.Unknown) as error:
        sys.exit(f"{error}: its licence is not known")
    parts += [f"{RULE}\n{title}\n{RULE}\n\n{text.strip()}\n" for title, text in others]
    text = "\n".join(parts)
    if unnamed := re.findall(rf"(?m)^{RULE}\n(.*: )\n", text):
        sys.exit(f"without a licence: {unnamed}")
    into.write_text(text, "utf-8")


if __name__ == "__main__":
    main()
