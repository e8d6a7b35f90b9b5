"""A C++ compiler that reads Boost's headers once and not for each of PyCUDA's forty sources: ``$CXX`` of its build.

    python headers_once.py COMPILER HEADERS_FOLDER ARGUMENTS...

The first source that is compiled has them precompiled with just its flags; without the very same flags the compiler
would not take them, and go on as if there were none. Whatever is no compilation of C++ goes to the compiler as it is.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

HEADERS = ("boost/python/object.hpp", "boost/python/converter/registry.hpp")


def main() -> None:
    compiler, folder, arguments = sys.argv[1], Path(sys.argv[2]), sys.argv[3:]
    header, precompiled = folder / "once.h", folder / "once.h.gch"
    source = next((name for name in arguments if name.endswith(".cpp")), None)
    if "-c" in arguments and source is not None:
        if not precompiled.exists():
            listed = folder / "listed.h"
            listed.write_text("".join(f"#include <{name}>\n" for name in HEADERS), "utf-8")
            header.touch()  # an empty one: what is read where the other is not taken
            at = arguments.index("-o")
            flags = [name for name in arguments[:at] + arguments[at + 2:] if name not in ("-c", source)]
            subprocess.run([compiler, *flags, "-x", "c++-header", "-o", precompiled, listed], check=False)
        arguments = ["-include", str(header), *arguments]
    os.execvp(compiler, [compiler, *arguments])


if __name__ == "__main__":
    main()
