"""What is said of a release: which parts are inside, and where two builds differ."""

from __future__ import annotations

import copy
import subprocess
import zipfile
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.build.recipes import BUILD, recipe

inside, notices, same, sbom, release = map(recipe, ("inside", "notices", "same", "sbom", "release"))

BOM: dict[str, Any] = {
    "metadata": {"component": {"name": "kvstream", "bom-ref": "root-component"}},
    "components": [{"name": name, "version": version, "bom-ref": f"{name}=={version}"}
                   for name, version in (("Flask", "3.1"), ("prometheus_client", "0.26"), ("pip", "23"), ("h11", "1"))],
    "dependencies": [{"ref": "root-component", "dependsOn": ["Flask==3.1", "pip==23"]},
                     {"ref": "Flask==3.1", "dependsOn": ["pip==23"]}, {"ref": "pip==23"}, {"ref": "h11==1"}],
}


def zipped(path: Path, *members: tuple[str, bytes], year: int = 2026) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        for name, body in members:
            archive.writestr(zipfile.ZipInfo(name, (year, 1, 1, 0, 0, 0)), body)
    return path


# --- same -------------------------------------------------------------------------------------------------------------


def test_equal_folders_differ_in_nothing(tmp_path: Path) -> None:
    for name in ("one", "other"):
        (tmp_path / name / "deep").mkdir(parents=True)
        (tmp_path / name / "deep" / "file").write_bytes(b"same")
        (tmp_path / name / "link").symlink_to("deep/file")
    assert same.differences(tmp_path / "one", tmp_path / "other") == []


def test_what_differs_is_named(tmp_path: Path) -> None:
    one, other = tmp_path / "one", tmp_path / "other"
    for folder in (one, other):
        folder.mkdir()
        (folder / "file").write_bytes(b"0123" + folder.name.encode()[:1])
        (folder / f"only-{folder.name}").write_bytes(b"")
        (folder / "link").symlink_to(folder.name)
        zipped(folder / "a.pyz", ("x.py", folder.name.encode()), ("y.py", b"same"))
    found = "\n".join(same.differences(one, other))
    assert "file: 1 bytes, from 4 on" not in found  # both begin with an o
    assert "a.pyz: x.py: " in found and "y.py" not in found
    assert "link: another link" in found and f"only-one: only in {one}" in found and f"only in {other}" in found


def test_order_and_times_of_a_zip_count(tmp_path: Path) -> None:
    first = zipped(tmp_path / "1", ("x", b"x"), ("y", b"y"))
    assert same.differences(first, zipped(tmp_path / "2", ("y", b"y"), ("x", b"x"))) == [
        "1: the same members in another order"]
    assert len(same.differences(first, zipped(tmp_path / "3", ("x", b"x"), ("y", b"y"), year=2025))) == 2


def test_the_one_file_is_opened(tmp_path: Path) -> None:
    pack, files = recipe("pack"), []
    (tmp_path / "launcher").write_bytes(b"launcher")
    for text in ("one", "two"):
        folder = tmp_path / text / "tree"
        (folder / "_internal").mkdir(parents=True)
        (folder / "kvstream").write_bytes(b"program")
        (folder / "_internal" / "data").write_text(text, "utf-8")
        files.append(folder.parent / "kvstream")
        pack.pack(folder, tmp_path / "launcher", files[-1], level=1)
    assert [line.partition(": ")[2].partition(": ")[0] for line in same.differences(*files)] == [
        "(footer)", "_internal/data"]


# --- sbom and licences ------------------------------------------------------------------------------------------------


def test_only_what_is_inside_is_told() -> None:
    before = copy.deepcopy(BOM)
    made = sbom.cut(BOM, ["flask", "prometheus-client"])
    assert [one["name"] for one in made["components"]] == ["Flask", "prometheus_client"]
    assert made["dependencies"] == [{"ref": "root-component", "dependsOn": ["Flask==3.1"]}, {"ref": "Flask==3.1"}]
    assert made["metadata"]["component"]["version"] == sbom.version() and BOM == before
    with pytest.raises(KeyError):
        sbom.cut(BOM, ["quart"])


def test_of_a_zipapp_the_records_in_it_count(tmp_path: Path) -> None:
    file = zipped(tmp_path / "a.pyz", ("flask/app.py", b""), ("flask-3.1.dist-info/METADATA", b""))
    assert [one["name"] for one in sbom.of_the_zipapp(BOM, file)["components"]] == ["Flask"]
    with pytest.raises(ValueError, match="Flask is another version"):
        sbom.of_the_zipapp(BOM, zipped(tmp_path / "b.pyz", ("flask-3.0.dist-info/METADATA", b"")))


def test_what_a_library_was_compiled_from(tmp_path: Path) -> None:
    library = tmp_path / "_internal" / "xllamacpp" / "x.so"
    library.parent.mkdir(parents=True)
    library.write_bytes(b"\0/root/.cargo/registry/src/index.crates.io-19/hashbrown-0.15.4/src/lib.rs\0"
                        b"/rust/deps/hashbrown-0.17.1/src/raw.rs\0/w/build/_deps/boringssl-src/ssl/a.cc\0"
                        b"/w/llama.cpp/vendor/nlohmann/json.hpp\0/w/llama.cpp/src/llama.cpp\0")
    assert inside.compiled_in(library) == [("boringssl", ""), ("hashbrown", "0.15.4"), ("hashbrown", "0.17.1"),
                                           ("nlohmann", "")]
    title, text = notices.llama_notice(tmp_path)
    assert title.endswith("MIT") and "BoringSSL" in text
    library.write_bytes(b"/root/.cargo/registry/src/index.crates.io-19/serde_jso-1.0.0/src/lib.rs\0")
    with pytest.raises(LookupError, match=r"serde_jso is compiled into x\.so"):
        notices.llama_notice(tmp_path)


def test_a_module_of_nobody_stops_the_build(monkeypatch: pytest.MonkeyPatch) -> None:
    known = ["click.core", "trio", "asyncio.events", "kvstream.cli", "_sysconfigdata__linux"]
    monkeypatch.setattr(inside, "modules", lambda _folder: {*known})
    assert inside.distributions(Path()) == ["click", "pyinstaller", "trio"]
    monkeypatch.setattr(inside, "modules", lambda _folder: {*known, "stowaway.thing"})
    with pytest.raises(inside.Unknown, match=r"stowaway\.thing"):
        inside.distributions(Path())


def test_nothing_under_the_gpl_alone_is_collected() -> None:
    assert '"readline"' in (BUILD / "kvstream.spec").read_text("utf-8")


# --- release ----------------------------------------------------------------------------------------------------------


def test_sha256sum_reads_the_sums(tmp_path: Path) -> None:
    (tmp_path / "kvstream.pyz").write_bytes(b"one")
    (tmp_path / "LICENSE").write_bytes(b"two")
    release.sums(tmp_path)
    names = [line.split("  ")[1] for line in (tmp_path / release.SUMS).read_text("utf-8").splitlines()]
    assert names == ["LICENSE", "kvstream.pyz"]  # without folders: they are downloaded to other ones
    check = ["sha256sum", "--check", "--strict", release.SUMS]
    assert subprocess.run(check, cwd=tmp_path, capture_output=True).returncode == 0
    (tmp_path / "LICENSE").write_bytes(b"three")
    assert subprocess.run(check, cwd=tmp_path, capture_output=True).returncode == 1


def test_the_builds_programs_say_what_they_take() -> None:
    """Each is run as a program and has its usage in its first lines."""
    modules: list[ModuleType] = [inside, notices, same, sbom, release]
    for module in modules[1:]:
        name = Path(str(module.__file__)).name
        assert f"python build/{name}" in str(module.__doc__)
