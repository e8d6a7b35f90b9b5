"""auth.keys_file: what is read, what is refused, and that a refusal names the line and never a secret."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import pytest

from kvstream.config import AuthConfig, Config, load_config
from kvstream.config_auth import KEYS_MAX, ClientKey, client_keys, keys_file_warning, read_keys_file
from kvstream.errors import ConfigError

SECRET = "kvs-very-secret"
DIGEST = hashlib.sha256(SECRET.encode())


def wrong(folder: Path, text: str | bytes) -> list[str]:
    path = folder / "keys.toml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ConfigError) as caught:
        read_keys_file(path)
    assert SECRET not in str(caught.value)
    return [problem.removeprefix(f"{path}: ") for problem in caught.value.problems]


def test_what_a_file_may_say(tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    path.write_bytes(b"\xef\xbb\xbf" + f"""# a comment
[[key]]
name = "alice"
key = "{SECRET}"

 [[ key ]]
name = "Bob-2.x_y"
sha256 = "{'AB' * 32}"
priority = "high"
share = 3
rate = 0.5
""".encode())
    assert read_keys_file(path) == (
        ClientKey("alice", DIGEST.digest(), "normal", 1.0, 0.0),
        ClientKey("Bob-2.x_y", bytes.fromhex("ab" * 32), "high", 3.0, 0.5))
    assert SECRET not in repr(read_keys_file(path))


@pytest.mark.parametrize(("fields", "says"), [
    ('key = "x"', "name must be"),
    ('name = ""\nkey = "x"', "name must be"),
    ('name = "a b"\nkey = "x"', "name must be"),
    ('name = "ü"\nkey = "x"', "name must be"),
    (f'name = "{"n" * 65}"\nkey = "x"', "name must be"),
    ('name = 3\nkey = "x"', "name must be"),
    ('name = "a"', "needs key or sha256"),
    (f'name = "a"\nkey = "{SECRET}"\nsha256 = "{DIGEST.hexdigest()}"', "both key and sha256"),
    ('name = "a"\nkey = ""', "key must be 1 to 512 characters"),
    (f'name = "a"\nkey = "{SECRET} "', "key must be"),
    (f'name = "a"\nkey = "{SECRET} x"', "key must be"),
    (f'name = "a"\nkey = "{SECRET}ü"', "key must be"),
    (f'name = "a"\nkey = "{SECRET}\\n"', "key must be"),
    (f'name = "a"\nkey = ["{SECRET}"]', "key must be"),
    (f'name = "a"\nkey = "{"k" * 513}"', "key must be"),
    (f'name = "a"\nsha256 = "{SECRET}"', "sha256 must be 64"),
    ('name = "a"\nkey = "x"\npriority = "urgent"', 'priority must be "high", "normal" or "low", not "urgent"'),
    ('name = "a"\nkey = "x"\npriority = 1', "priority must be"),
    ('name = "a"\nkey = "x"\npriority = []', "priority must be"),
    ('name = "a"\nkey = "x"\nshare = 0', "share must be"),
    ('name = "a"\nkey = "x"\nshare = nan', "share must be"),
    ('name = "a"\nkey = "x"\nshare = true', "share must be"),
    ('name = "a"\nkey = "x"\nrate = -1', "rate must be"),
    ('name = "a"\nkey = "x"\nrate = "1"', "rate must be"),
    ('name = "a"\nkey = "x"\nadmin = true', "unknown field admin; a key has"),
])
def test_a_wrong_key_is_told_with_its_line(tmp_path: Path, fields: str, says: str) -> None:
    (problem,) = wrong(tmp_path, f'# head\n[[key]]\nname = "good"\nkey = "good"\n\n[[key]]\n{fields}\n')
    field = "admin" if "admin" in says else "sha256" if "both" in says else says.split()[0]
    line = next((n for n, text in enumerate(fields.split("\n"), 7) if text.startswith(f"{field} =")), 6)
    assert problem.startswith(f"line {line}: ") and says in problem


def test_every_problem_at_once(tmp_path: Path) -> None:
    problems = wrong(tmp_path, '[[key]]\nname = "a"\n[[key]]\nkey = "x"\nrate = -1\n')
    assert [problem.partition(":")[0] for problem in problems] == ["line 1", "line 3", "line 5"]


def test_a_string_of_several_lines_feigns_no_field(tmp_path: Path) -> None:
    (problem,) = wrong(tmp_path, '[[key]]\nname = "a"\nkey = """\nrate = 1\n"""\n')
    assert problem.startswith("line 1: key must be")


@pytest.mark.parametrize(("second", "says"), [
    (f'name = "a"\nsha256 = "{"0" * 64}"', "the name a is taken"),
    (f'name = "b"\nkey = "{SECRET}"', "the same key"),
    (f'name = "b"\nsha256 = "{DIGEST.hexdigest()}"', "the same key"),
])
def test_names_and_keys_are_there_once(tmp_path: Path, second: str, says: str) -> None:
    (problem,) = wrong(tmp_path, f'[[key]]\nname = "a"\nkey = "{SECRET}"\n[[key]]\n{second}\n')
    assert problem.startswith(f"line {5 if 'name' in says else 6}: ") and says in problem


@pytest.mark.parametrize(("text", "says"), [
    ("", "has no [[key]]"),
    ("key = []", "has no [[key]]"),
    ("key = 3", "[[key]]"),
    ('[key]\nname = "a"', "[[key]]"),
    (f'[auth]\nkeys = ["{SECRET}"]', "only [[key]] tables"),
    (f'[[keys]]\nname = "{SECRET}"', "only [[key]] tables"),
    (f'[[key]]\nkey = "{SECRET}', "line 2, column"),
    (b'[[key]]\nname = "\xff"', "line 2: is not UTF-8"),
    ("#" * 2**20 + "#", "is larger than"),
    ("".join(f'[[key]]\nname = "n{i}"\nkey = "k{i}"\n' for i in range(KEYS_MAX + 1)), "1000 are the most"),
])
def test_a_file_that_is_none(tmp_path: Path, text: str | bytes, says: str) -> None:
    (problem,) = wrong(tmp_path, text)
    assert says in problem


def test_a_string_that_looks_like_a_header_does_not_shift_the_lines(tmp_path: Path) -> None:
    problems = wrong(tmp_path, '[[key]]\nname = """\n[[key]]\n"""\nkey = "x"\n[[key]]\nname = "b"\n')
    assert [problem.partition(":")[0] for problem in problems] == ["key 1", "key 2"]


def test_a_missing_file_keeps_the_gateway_from_starting(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(env={}, flags={"auth.keys_file": str(tmp_path / "none")})
    assert "auth.keys_file" in str(caught.value) and "cannot be read" in str(caught.value)


def test_keys_beside_a_file(tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    path.write_text(f'[[key]]\nname = "a"\nkey = "{SECRET}"\n', "utf-8")
    found = client_keys(AuthConfig(keys_file=str(path), keys=("one", "two")))
    assert [entry.name[:4] for entry in found] == ["a", "key-", "key-"] and len({e.name for e in found}) == 3
    again = client_keys(AuthConfig(keys=("two",)))
    assert again[0] == found[2]  # its name is not its place in the list
    with pytest.raises(ConfigError, match="keys_file has too") as caught:
        client_keys(AuthConfig(keys_file=str(path), keys=(SECRET,)))
    assert SECRET not in str(caught.value)


@pytest.mark.parametrize("keys", [("",), ("a b",), ("ü",), ("x", "x"), ("a\n",)])
def test_keys_that_are_none(keys: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError):
        load_config(env={}, flags={"auth.keys": keys})


@pytest.mark.skipif(os.name != "posix", reason="file modes")
@pytest.mark.parametrize(("mode", "doubtful"), [(0o600, False), (0o400, False), (0o640, True), (0o604, True)])
def test_a_file_that_others_can_read_is_told(tmp_path: Path, mode: int, doubtful: bool) -> None:
    path = tmp_path / "keys.toml"
    path.write_text("")
    path.chmod(mode)
    assert bool(keys_file_warning(AuthConfig(keys_file=str(path)))) is doubtful


@pytest.mark.parametrize(("origins", "says"), [
    (("https://a.example/",), "must be origins"), (("a.example",), "must be origins"), (("null",), "must be origins"),
    (("https://*.example",), "must be origins"), (("https://A.example",), "lower case"),
    (("https://a.example:443",), "usual port"), (("https://a, https://b",), "must be origins"),
])
def test_origins_that_no_browser_sends(origins: tuple[str, ...], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        load_config(env={}, flags={"server.cors_origins": origins})


def test_every_origin_and_keys_do_not_go_together() -> None:
    with pytest.raises(ConfigError, match="cors_origins"):
        load_config(env={}, flags={"server.cors_origins": ("*",), "auth.keys": ("one",)})
    assert load_config(env={}, flags={"server.cors_origins": ("*",)}).config.server.cors_origins == ("*",)
    assert not Config().auth.enabled
