"""What the executable and the zipapp consist of, as CycloneDX: for whoever looks up advisories by machine.

    python build/sbom.py CYCLONEDX FOLDER INTO

CYCLONEDX is the program ``cyclonedx-py`` (build/release.lock), FOLDER what PyInstaller collected. Run by the Python of
the build's environment, with PyCUDA on its path. cyclonedx-py describes that environment: INTO/environment.json. In
INTO/sbom.json it is cut down to what is really inside, and what is no Python package is added: Python, the system's
libraries, what wheels have compiled in, the launcher's libraries. ``of_the_zipapp`` does the same for that one, and
needs the first list only. There is no time and nothing at random in them.
"""

from __future__ import annotations

import decimal
import json
import pyexpat
import re
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any
from urllib.parse import quote

import inside
from notices import IN_THE_LAUNCHER, package_of, package_version, system_libraries

ROOT = Path(__file__).resolve().parents[1]
# auditwheel's libraries, by the beginning of their files' names.
IN_WHEELS = {"libscipy_openblas": "OpenBLAS", "libgfortran": "libgfortran", "libquadmath": "libquadmath"}
Component = dict[str, Any]


def environment_bom(cyclonedx: Path) -> Component:
    """What cyclonedx-py says of the environment of this Python."""
    with tempfile.TemporaryDirectory() as folder:
        into = Path(folder) / "bom.json"
        subprocess.run([cyclonedx, "environment", "--pyproject", ROOT / "pyproject.toml", "--mc-type", "application",
                        "--output-reproducible", "--spec-version", "1.6", "--output-file", into, sys.executable],
                       check=True)
        bom: Component = json.loads(into.read_text("utf-8"))
    return bom


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def version() -> str:
    found = re.search(r'(?m)^__version__ = "(.+)"', (ROOT / "kvstream" / "__init__.py").read_text("utf-8"))
    assert found is not None
    return found[1]


def cut(bom: Component, names: list[str]) -> Component:
    """Only these distributions, and what they need of each other. *Errors*: ``KeyError`` for one that is not there."""
    by_name = {canonical(one["name"]): one for one in bom["components"]}
    kept = sorted((by_name[canonical(name)] for name in names), key=lambda one: canonical(one["name"]))
    refs = {one["bom-ref"] for one in kept} | {"root-component"}
    needs = [{**one, "dependsOn": [ref for ref in one["dependsOn"] if ref in refs]} if "dependsOn" in one else one
             for one in bom["dependencies"] if one["ref"] in refs]
    root = {**bom["metadata"]["component"], "version": version()}
    return {**bom, "metadata": {**bom["metadata"], "component": root}, "components": kept,
            "dependencies": [{key: value for key, value in one.items() if value != []} for one in needs]}


def component(name: str, version: str = "", **more: Any) -> Component:
    about = {"type": "library", "bom-ref": f"{name}@{version}" if version else name, "name": name, **more}
    return {**about, "version": version} if version else about


def crate(name: str, version: str) -> Component:
    return component(name, version, **({"purl": f"pkg:cargo/{name}@{version}"} if version else {}))


def system_components(folder: Path) -> list[Component]:
    """Of Debian's packages: name, version, and which files of theirs are inside."""
    by_package: dict[str, list[str]] = {}
    for library in [*system_libraries(folder), *IN_THE_LAUNCHER]:
        by_package.setdefault(package_of(library), []).append(library)
    return [component(package, (has := package_version(package)), properties=_files(libraries),
                      purl=f"pkg:deb/debian/{package}@{quote(has, safe='')}")
            for package, libraries in sorted(by_package.items())]


def _files(names: list[str]) -> list[Component]:
    return [{"name": "kvstream:file", "value": name} for name in names]


def python_component() -> Component:
    python = sys.version.split()[0]
    parts = [component("expat", pyexpat.EXPAT_VERSION.partition("_")[2]),
             component("libmpdec", decimal.__libmpdec_version__)]  # type: ignore[attr-defined]
    return component("python", python, type="platform", purl=f"pkg:generic/python@{python}", components=parts,
                     licenses=[{"license": {"id": "PSF-2.0"}}])


def in_wheels(folder: Path) -> dict[str, list[Component]]:
    """Canonical name of a distribution to what it has compiled in."""
    internal = folder / "_internal"
    llama = [component("llama.cpp", licenses=[{"license": {"id": "MIT"}}], components=[
        crate(*one) for path in sorted((internal / "xllamacpp").glob("*.so")) for one in inside.compiled_in(path)])]
    libraries = [component(title, properties=_files([path.name]))
                 for path in sorted(internal.glob("numpy.libs/*")) for beginning, title in IN_WHEELS.items()
                 if path.name.startswith(beginning)]
    return {"xllamacpp": llama, "numpy": libraries}


def of_the_executable(bom: Component, folder: Path) -> Component:
    made = cut(bom, inside.distributions(folder))
    more = in_wheels(folder)
    packages = [{**one, "components": more[name]} if (name := canonical(one["name"])) in more else one
                for one in made["components"]]
    return {**made, "components": [*packages, python_component(), *system_components(folder)]}


def of_the_zipapp(bom: Component, file: Path) -> Component:
    """The records of its packages are in it, as far as their names and versions."""
    with zipfile.ZipFile(file) as archive:
        found = {name.partition(".dist-info/")[0].rpartition("-")[::2] for name in archive.namelist()
                 if name.endswith(".dist-info/METADATA")}
    made = cut(bom, [name for name, _version in found])
    versions = {canonical(name): said for name, said in found}
    for one in made["components"]:
        if versions[canonical(one["name"])] != one["version"]:
            raise ValueError(f"{one['name']} is another version in {file}")
    return made


def write(made: Component, into: Path) -> None:
    into.write_text(json.dumps(made, indent=1, sort_keys=True, ensure_ascii=False) + "\n", "utf-8")
    print(f"{into.name}: {len(made['components'])} components")


def main() -> None:
    cyclonedx, folder, into = map(Path, sys.argv[1:])
    bom = environment_bom(cyclonedx)
    write(bom, into / "environment.json")
    write(of_the_executable(bom, folder), into / "sbom.json")


if __name__ == "__main__":
    main()
