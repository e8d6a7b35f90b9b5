"""``just kernels``: compiles kvstream/cuda/kernels/kv.cu for every supported GPU, and keeps what the compiler said.

    python build/kernels.py [--nvcc PATH] [--check]

Writes beside the sources ``kv.fatbin`` (one image: machine code for each architecture, and PTX from which the driver
makes code for newer ones) and ``kernels.txt`` (registers and spills of each kernel on each architecture, sizes, what it
was built from). A spill or a stack frame in an attention kernel is an error. ``--check`` only says whether
``kv.fatbin`` is that of these sources.
"""

from __future__ import annotations

import argparse
import hashlib
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

HERE = Path(__file__).resolve().parents[1] / "kvstream" / "cuda" / "kernels"
ARCHITECTURES = (75, 80, 86, 89, 90, 100, 120)
PTX = 75  # the oldest: runs on all that come after
# No contraction: a product and a sum are two roundings, on every machine the same ones (README.md beside the sources).
FLAGS = ("-std=c++17", "-O3", "--fmad=false", "--compress-mode=size")
MIB_MAX = 2.0


def sources() -> list[Path]:
    return sorted([*HERE.glob("*.cu"), *HERE.glob("*.cuh")])


def digest() -> str:
    """Of the sources and the flags: what an image must say to be the one of this checkout."""
    made_of = hashlib.sha256(repr((FLAGS, ARCHITECTURES, PTX)).encode())
    for source in sources():
        made_of.update(source.read_bytes())
    return made_of.hexdigest()[:32]


def compiled(nvcc: str, into: Path) -> str:
    """The image is written to ``into``; what ptxas said is returned."""
    targets = [f"-gencode=arch=compute_{arch},code=sm_{arch}" for arch in ARCHITECTURES]
    command = [nvcc, *FLAGS, "-fatbin", *targets, f"-gencode=arch=compute_{PTX},code=compute_{PTX}", "-Xptxas", "-v",
               "-o", str(into), str(HERE / "kv.cu")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(command)}\n{done.stdout}{done.stderr}")
    return done.stdout + done.stderr


def rows(said: str) -> list[tuple[str, str, int, int, int]]:
    """(kernel, architecture, registers, bytes of stack, bytes spilled) of everything that ptxas compiled."""
    pattern = re.compile(r"Compiling entry function '(\w+)' for '(sm_\d+)'.*?(\d+) bytes stack frame, "
                         r"(\d+) bytes spill stores, (\d+) bytes spill loads.*?Used (\d+) registers", re.DOTALL)
    return [(name, arch, int(registers), int(stack), int(stores) + int(loads))
            for name, arch, stack, stores, loads, registers in pattern.findall(said)]


def report(nvcc: str, found: Sequence[tuple[str, str, int, int, int]], size: int) -> str:
    version = subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=True).stdout.split()
    arches = [f"sm_{arch}" for arch in ARCHITECTURES]
    by_kernel: dict[str, dict[str, tuple[int, int, int]]] = {}
    for name, arch, registers, stack, spilled in found:
        by_kernel.setdefault(name, {})[arch] = registers, stack, spilled
    lines = [f"digest {digest()}", f"nvcc {version[-1]}", f"flags {' '.join(FLAGS)}",
             f"kv.fatbin {size} bytes: {' '.join(arches)} and PTX compute_{PTX}", "",
             "registers per thread (stack + spilled bytes, where there are any)", "",
             f"{'kernel':16}" + "".join(f"{arch:>10}" for arch in arches)]
    for name in sorted(by_kernel, key=lambda text: (text.rstrip("0123456789"), len(text), text)):
        cells = []
        for arch in arches:
            registers, stack, spilled = by_kernel[name][arch]
            cells.append(str(registers) + (f" ({stack}+{spilled})" if stack or spilled else ""))
        lines.append(f"{name:16}" + "".join(f"{cell:>10}" for cell in cells))
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--nvcc", default="nvcc")
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args()
    kept = HERE / "kernels.txt"
    if options.check:
        said = kept.read_text("utf-8") if kept.is_file() and (HERE / "kv.fatbin").is_file() else ""
        same = said.startswith(f"digest {digest()}\n")
        sys.exit(0 if same else "kv.fatbin was not built from these sources: run `just kernels`")
    with tempfile.TemporaryDirectory() as folder:
        image = Path(folder) / "kv.fatbin"
        found = rows(compiled(options.nvcc, image))
        text = report(options.nvcc, found, image.stat().st_size)
        print(text)
        spilling = [f"{name} on {arch}" for name, arch, _, stack, spilled in found
                    if name.startswith(("kv_attend", "kv_wide")) and (stack or spilled)]
        if spilling:
            sys.exit(f"spills: {', '.join(spilling)}")
        if image.stat().st_size > MIB_MAX * 2**20:
            sys.exit(f"the image has {image.stat().st_size} bytes, more than {MIB_MAX} MiB")
        (HERE / "kv.fatbin").write_bytes(image.read_bytes())
        kept.write_text(text, "utf-8")


if __name__ == "__main__":
    main()
