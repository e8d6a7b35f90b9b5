"""Builds what the simulated driver needs, each thing once per content: PyCUDA from its source distribution, the driver
itself, kernel modules compiled for the host.

Everything lands in one cache folder under a name with a hash of all that went in; another process may build the same
at the same time (a lock per thing, a rename at the end). ``KVSTREAM_CUDA_ROOT`` names the folder with
``include/cuda.h`` when it is not in a usual place; where there is none, two small wheels of NVIDIA's bring the headers.
``KVSTREAM_CUDA_CACHE`` names a cache folder to share between checkouts.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shlex
import shutil
import struct
import subprocess
import sys
import sysconfig
import tempfile
import zipfile
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

HERE = Path(__file__).resolve().parent
HEADERS_ONCE = HERE / "headers_once.py"
ROOT = HERE.parents[2]
KERNELS = ROOT / "kvstream" / "cuda" / "kernels"
PYCUDA = "2026.1"
HEADERS = ("nvidia-cuda-runtime==13.0.96", "nvidia-cuda-profiler-api==13.0.85")
KEPT = 6  # versions of one thing in the cache

PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input")

DRIVER_SOURCES = ("memory", "schedule", "checker", "launch", "core", "api_device", "api_memory", "api_stream",
                  "api_module", "control")
DRIVER_FLAGS = ("-std=c++17", "-O2", "-g1", "-fPIC", "-fno-strict-aliasing", "-fno-omit-frame-pointer", "-Wall",
                "-Wextra", "-U_FORTIFY_SOURCE")  # a longjmp between stacks is what _FORTIFY_SOURCE forbids
KERNEL_FLAGS = ("-std=c++17", "-O2", "-g1", "-fPIC", "-fvisibility=hidden", "-fno-gnu-unique", "-ffp-contract=off",
                "-fno-strict-aliasing", "-U_FORTIFY_SOURCE", "-DKVS_SIM=1")
CHECKED_FLAGS = ("-DKVS_SIM_CHECKED=1",)
INSTRUMENT = ("-fsanitize=thread", "--param=tsan-instrument-func-entry-exit=0")  # compiled in, never linked: hooks.cpp


def processor_flags() -> tuple[str, ...]:
    """With the processor's own fused multiply-add and half conversion kernels run more than twice as fast, to the same
    bits: nothing is fused that is not written so."""
    try:
        flags = Path("/proc/cpuinfo").read_text("utf-8")
    except OSError:
        return ()
    return ("-mavx2", "-mfma", "-mf16c") if all(f" {name}" in flags for name in ("avx2", "fma", "f16c")) else ()


class BuildFailed(Exception):
    """A compiler or pip failed; the text ends with what it said."""


class NothingToBuildWith(Exception):
    """No C++ compiler on this machine, or no CUDA headers and no way to fetch them."""


def cuda_root() -> Path | None:
    """A CUDA toolkit, or at least its headers, on this machine."""
    named = os.environ.get("KVSTREAM_CUDA_ROOT")
    places = [named] if named else ["/usr/local/cuda-13.0", os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"),
                                    "/usr/local/cuda", "/opt/cuda"]
    return next((Path(place) for place in places if place and (Path(place) / "include" / "cuda.h").is_file()), None)


def run(command: Sequence[str | Path], cwd: Path | None = None, **environment: str) -> str:
    done = subprocess.run([str(part) for part in command], cwd=cwd, env={**os.environ, **environment},
                          stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                          errors="replace")
    if done.returncode:
        raise BuildFailed(f"{' '.join(map(str, command))}\nended with {done.returncode}:\n{done.stdout[-8000:]}")
    return done.stdout


class Builder:
    """All builds of one cache folder. ``plain``: PyCUDA as its sources say, for what is shipped; otherwise they share a
    precompiled header, which takes two thirds of the time and gives other bytes."""

    def __init__(self, cache: Path, plain: bool = False) -> None:
        self.plain = plain
        self.cache = cache.resolve()
        self.cache.mkdir(parents=True, exist_ok=True)
        self.cxx = os.environ.get("CXX", "g++")
        if shutil.which(self.cxx) is None:
            raise NothingToBuildWith(f"no C++ compiler {self.cxx}")
        self._machine: tuple[str, ...] = ()
        try:
            self.root = cuda_root() or self._once("headers", HEADERS, [], self._fetch_headers)
        except BuildFailed as failed:
            raise NothingToBuildWith(f"no include/cuda.h here (KVSTREAM_CUDA_ROOT), and {failed}") from None
        header = (self.root / "include" / "cuda.h").read_bytes()
        self._machine = (run([self.cxx, "--version"]).splitlines()[0], hashlib.sha256(header).hexdigest())

    # --- what there is ------------------------------------------------------------------------------------------------

    def pycuda(self) -> Path:
        """A folder for ``sys.path`` of a child, with PyCUDA and what it imports (numpy excepted)."""
        import numpy

        facts = (PYCUDA, sysconfig.get_platform(), sysconfig.get_config_var("SOABI"), numpy.__version__.split(".")[0],
                 self._siteconf(Path("stub")))
        if self.plain:
            return self._once("pycuda", (*facts, "plain"), [], self._build_pycuda)
        return self._once("pycuda", facts, [HEADERS_ONCE], self._build_pycuda)

    def driver(self) -> Path:
        """``libcuda.so.1``: our sources, and a stub for each other symbol that PyCUDA links to."""
        sources = [HERE / f"{name}.cpp" for name in DRIVER_SOURCES]
        wanted = self.wanted_symbols()
        headers = [HERE / "sim.h", HERE / "state.h"]
        folder = self._once("driver", (*DRIVER_FLAGS, *wanted), [*sources, *headers],
                            lambda into: self._build_driver(into, sources, wanted))
        return folder / "libcuda.so.1"

    def image(self, name: str, checked: bool) -> Path:
        """A module image: ``kv`` is the product's kernels, another name those of ``NAME.cu`` in this folder, ``toy`` a
        module without fibers, for the tests of the driver itself."""
        cuda = sorted(KERNELS.glob("*.cu")) if name == "kv" else [HERE / f"{name}.cu"]
        plain = sorted(HERE.glob("fibers*.cpp")) + ([HERE / "hooks.cpp"] if checked else [])
        if name == "toy":
            cuda, plain = [], [HERE / "toy.cpp"]
        around = [*HERE.glob("*.h"), *KERNELS.glob("*.cuh"), *KERNELS.glob("*.h")]
        flags = (*KERNEL_FLAGS, *processor_flags(), *(CHECKED_FLAGS if checked else ()), *INSTRUMENT)
        folder = self._once(f"{name}-{'checked' if checked else 'fast'}", flags, [*cuda, *plain, *around],
                            lambda into: self._build_image(into, cuda, plain, checked))
        return folder / "module.image"

    def wanted_symbols(self) -> tuple[str, ...]:
        """The driver's symbols that PyCUDA's extension imports."""
        extension = next((self.pycuda() / "pycuda").glob("_driver*.so"))
        lines = run(["nm", "-D", "--undefined-only", extension]).splitlines()
        return tuple(sorted(name for line in lines if (name := line.split()[-1].split("@")[0]).startswith("cu")))

    # --- how ----------------------------------------------------------------------------------------------------------

    def _once(self, name: str, facts: Iterable[object], files: Iterable[Path], build: Callable[[Path], None]) -> Path:
        digest = hashlib.sha256(repr((self._machine, tuple(facts))).encode())
        for file in files:
            digest.update(file.name.encode() + b"\0" + file.read_bytes())
        folder = self.cache / f"{name}-{digest.hexdigest()[:16]}"
        if folder.is_dir():
            return folder
        with (self.cache / f"{name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if folder.is_dir():
                return folder
            with tempfile.TemporaryDirectory(dir=self.cache, prefix=f"{name}.making-") as making:
                into = Path(making) / "it"
                into.mkdir()
                build(into)
                into.rename(folder)
            older = sorted(self.cache.glob(f"{name}-*/"), key=lambda path: path.stat().st_mtime)
            for path in older[:-KEPT]:
                shutil.rmtree(path, ignore_errors=True)
        return folder

    def _siteconf(self, stub: Path) -> str:
        values = {"BOOST_INC_DIR": [], "BOOST_LIB_DIR": [], "USE_SHIPPED_BOOST": True, "CUDA_TRACE": False,
                  "CUDA_ROOT": str(self.root), "CUDA_INC_DIR": [str(self.root / "include")], "CUDA_ENABLE_GL": False,
                  "CUDA_ENABLE_CURAND": False, "CUDADRV_LIB_DIR": [str(stub)], "CUDADRV_LIBNAME": ["cuda"],
                  "CUDART_LIB_DIR": [], "CUDART_LIBNAME": [], "CXXFLAGS": ["-O1", "-g0", "-w"], "LDFLAGS": []}
        return "".join(f"{key} = {value!r}\n" for key, value in values.items())

    def _fetch_headers(self, into: Path) -> None:
        work = into.parent / "wheels"
        run([*PIP, "download", "--no-deps", "--only-binary", ":all:", "-d", work, *HEADERS])
        for path in work.glob("*.whl"):
            with zipfile.ZipFile(path) as wheel:
                for name in wheel.namelist():
                    _, include, below = name.partition("/include/")
                    if include and below.endswith(".h") and "/" not in below:
                        (into / "include").mkdir(exist_ok=True)
                        (into / "include" / below).write_bytes(wheel.read(name))

    def _build_pycuda(self, into: Path) -> None:
        # `import pycuda.driver` needs nothing but numpy, which the child takes from this environment.
        with zipfile.ZipFile(self.pycuda_wheel(into.parent)) as wheel:
            wheel.extractall(into)

    def pycuda_wheel(self, work: Path, *more: str | Path, pip: Sequence[str] = PIP) -> Path:
        """Compiled in ``work``, with ``more`` options for pip."""
        (work / "stub").mkdir()
        # Something to link against: the name inside is all that counts, the symbols may stay open.
        (work / "stub.c").write_text("int cuInit(unsigned flags) { return (int)flags; }\n", "utf-8")
        run([self.cxx, "-x", "c", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-o", work / "stub" / "libcuda.so",
             work / "stub.c"])
        # Its settings are read from the source folder or from this file in the home folder; the latter takes one
        # command of pip, the former three. pip itself goes on with what it finds in the real home.
        home = work / "home"
        home.mkdir()
        (home / ".aksetup-defaults.py").write_text(self._siteconf(work / "stub"), "utf-8")
        real = Path.home()
        for name in (".pip", ".netrc"):
            if (real / name).exists():
                (home / name).symlink_to(real / name)
        # Without pip's cache: what lies there may have been built with other settings, and ours is for nobody else.
        compiler = {}
        if not self.plain:
            once = work / "once"
            once.mkdir()
            compiler["CXX"] = shlex.join([sys.executable, str(HEADERS_ONCE), self.cxx, str(once)])
            compiler["CC"] = compiler["CXX"]
        run([*pip, "wheel", "--no-cache-dir", "--no-deps", "--no-binary", "pycuda", "-w", work / "wheels", *more,
             f"pycuda=={PYCUDA}"], HOME=str(home), **compiler,
            XDG_CONFIG_HOME=os.environ.get("XDG_CONFIG_HOME", str(real / ".config")))
        return next((work / "wheels").glob("*.whl"))

    def _build_driver(self, into: Path, sources: Sequence[Path], wanted: Iterable[str]) -> None:
        work = into.parent
        objects = self._compile(work, [(source, (*DRIVER_FLAGS, f"-I{self.root / 'include'}")) for source in sources])
        defined = {line.split()[-1] for line in run(["nm", "--defined-only", *objects]).splitlines() if line.strip()}
        missing = [name for name in wanted if name not in defined]
        stubs = work / "stubs.cpp"
        lines = [f'int {name}() {{ return sim_unsupported("{name}"); }}' for name in missing]
        stubs.write_text('extern "C" {\nint sim_unsupported(const char *);\n' + "\n".join(lines) + "\n}\n", "utf-8")
        objects += self._compile(work, [(stubs, ("-O1", "-fPIC"))])
        run([self.cxx, "-shared", "-Wl,-soname,libcuda.so.1", "-Wl,-Bsymbolic", "-Wl,-z,defs", "-o",
             into / "libcuda.so.1", *objects, "-ldl", "-lpthread"])
        (into / "stubs.txt").write_text("\n".join(missing) + "\n", "utf-8")

    def _build_image(self, into: Path, cuda: Sequence[Path], plain: Sequence[Path], checked: bool) -> None:
        flags = (*KERNEL_FLAGS, *processor_flags(), *(CHECKED_FLAGS if checked else ()),
                 f"-I{self.root / 'include'}", f"-I{HERE}", f"-I{KERNELS}", *(["-DTOY_CHECKED=1"] if checked else []))
        kernel = (*flags, "-x", "c++", "-include", str(HERE / "kernel_host.h"), *(INSTRUMENT if checked else ()))
        objects = self._compile(into.parent, [*((source, kernel) for source in cuda),
                                              *((source, flags) for source in plain)])
        module = into.parent / "module.so"
        run([self.cxx, "-shared", "-Wl,-Bsymbolic", "-Wl,-z,defs", "-o", module, *objects, "-ldl"])
        body = module.read_bytes()
        (into / "module.image").write_bytes(b"KVSIMSO1" + struct.pack("<Q", len(body)) + body)

    def _compile(self, work: Path, units: Sequence[tuple[Path, Sequence[str]]]) -> list[Path]:
        def one(unit: tuple[Path, Sequence[str]]) -> Path:
            source, flags = unit
            target = work / f"{source.name}.o"
            run([self.cxx, *flags, "-c", "-o", target, source])
            return target

        with ThreadPoolExecutor(os.cpu_count()) as threads:
            return list(threads.map(one, units))


def main() -> None:
    """``python -m tests.cuda.driver.build FOLDER``: everything that the tests will ask for."""
    builder = Builder(Path(sys.argv[1]))
    print(builder.driver())
    for name in ("toy", "kv"):
        for checked in (False, True):
            print(builder.image(name, checked))


if __name__ == "__main__":
    main()
