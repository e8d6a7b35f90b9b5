"""The release workflow, which nobody has run: what can be known of it by reading."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import yaml

from tests.build.recipes import BUILD, ROOT

FILE = ROOT / ".github" / "workflows" / "release.yml"
TEXT = FILE.read_text("utf-8")
WORKFLOW: dict[Any, Any] = yaml.safe_load(TEXT)
JOBS: dict[str, dict[str, Any]] = WORKFLOW["jobs"]
PINNED = re.compile(r"(?m)^ +(?:- )?uses: [\w.-]+/[\w.-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+$")


def steps(key: str) -> Iterator[Any]:
    return (step[key] for job in JOBS.values() for step in job["steps"] if key in step)


def test_it_says_that_it_was_never_run() -> None:
    assert "NEVER RUN SO FAR" in TEXT.partition("\nname:")[0]


def test_every_action_is_pinned_to_a_commit() -> None:
    uses = list(steps("uses"))
    assert len(uses) >= 6 and len(PINNED.findall(TEXT)) == len(uses)
    by_action: dict[str, set[str]] = {}
    for line in PINNED.findall(TEXT):
        action, _, version = line.partition("uses: ")[2].partition("@")
        by_action.setdefault(action, set()).add(version)
    assert all(len(versions) == 1 for versions in by_action.values())  # one version of each


def test_only_the_job_that_releases_may_write() -> None:
    assert WORKFLOW["permissions"] == {"contents": "read"}
    assert {name for name, job in JOBS.items() if "permissions" in job} == {"release"}
    assert JOBS["release"]["permissions"] == {"contents": "write", "id-token": "write", "attestations": "write"}
    assert not any("checkout" in step for step in (one.get("uses", "") for one in JOBS["release"]["steps"]))
    assert all(step["with"]["persist-credentials"] is False for job in JOBS.values() for step in job["steps"]
               if "checkout" in step.get("uses", ""))
    assert all(job["timeout-minutes"] <= 90 for job in JOBS.values())


def test_every_program_and_option_exists() -> None:
    commands = [found for script in steps("run") for found in re.findall(r"(build/\S+\.(?:py|sh))([^\n]*)", script)]
    assert {program for program, _ in commands} == {"build/bullseye.sh", "build/release.py", "build/onedir.py",
                                                    "build/smoke.py"}
    for program, arguments in commands:
        source = (BUILD.parent / program).read_text("utf-8")
        for option in re.findall(r"--[a-z-]+", arguments):
            assert f'"{option}"' in source, (program, option)


def test_what_is_built_is_what_is_handed_on() -> None:
    for name in ("linux", "folders"):
        paths = [step["with"]["path"] for step in JOBS[name]["steps"] if "upload-artifact" in step.get("uses", "")]
        assert paths == ["dist/release/"]
    assert 'ROOT / "dist" / "release"' in (BUILD / "release.py").read_text("utf-8")
    assert set(JOBS["release"]["needs"]) == JOBS.keys() - {"release"}
