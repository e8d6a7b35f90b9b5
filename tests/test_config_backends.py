"""``[[backend]]``: several backends in one configuration."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import attrs
import pytest
import tomli

from kvstream import config_show
from kvstream.config import KEYS, BackendConfig, Config, EmbeddedConfig, load_config
from kvstream.config_keys import SECRET_SHOWN, as_toml
from kvstream.config_load import check_together
from kvstream.errors import ConfigError
from tests.test_config import env_text, values

TWO = """
[[backend]]
name = "big"
base_url = "http://h:1"
api_key = "s3cret"
aliases = ["gpt-4o=qwen3"]
[[backend]]
type = "openai"
base_url = "http://h:2/v1"
models = ["a", "b"]
seats = 3
"""


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.chdir(tmp_path)

    def write(text: str) -> Path:
        path = tmp_path / "kvstream.toml"
        path.write_text(text, "utf-8")
        return path

    return write


def problems(**sources: Any) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load_config(**{"env": {}, **sources})
    return caught.value.problems


def test_one_backend_is_what_it_was() -> None:
    config = load_config(env={}).config
    assert config.backends == (attrs.evolve(BackendConfig(), name="llamacpp"),) and config.more_backends == ()


def test_two_backends_in_their_order(write: Any) -> None:
    write(TWO)
    loaded = load_config(env={})
    config = loaded.config
    assert [(b.name, b.type, b.url, b.models, b.seats) for b in config.backends] == [
        ("big", "llamacpp", "http://h:1", (), 0), ("openai", "openai", "http://h:2/v1", ("a", "b"), 3)]
    assert config.backend is not None and config.backend.api_key == "s3cret"
    assert config.backends[0].alias_table == {"gpt-4o": "qwen3"}
    assert loaded.origins["backend[1].name"] == "kvstream.toml" and loaded.origins["backend[1].seats"] == "default"
    assert loaded.origins["backend[2].seats"] == "kvstream.toml"
    assert config.of_backend(config.backends[1]).backends == config.backends[1:]


@pytest.mark.parametrize("about", [about for about in KEYS if about.section == "backend"], ids=lambda about: about.name)
def test_a_single_table_is_what_backend_would_be(about: Any, write: Any) -> None:
    in_file, in_env, in_flag = values(about)
    more = {} if about.name == "base_url" else {"base_url": "http://h:1"}
    rows = "".join(f"{name} = {as_toml(value)}\n" for name, value in ({about.name: in_file} | more).items())
    write(f"[[backend]]\n{rows}")
    loaded = load_config(env={})
    assert (loaded.config.get(about.path), loaded.origins[about.path]) == (in_file, "kvstream.toml")
    text = env_text(in_env)
    loaded = load_config(env={about.env: text})
    assert (loaded.config.get(about.path), loaded.origins[about.path]) == (in_env, f"env {about.env}")
    loaded = load_config(env={about.env: text}, flags={about.path: in_flag})
    assert loaded.config.get(about.path) == in_flag


def test_variables_and_flags_do_not_say_which_of_several(write: Any) -> None:
    write(TWO)
    found = problems(env={"KVSTREAM_BACKEND__SEATS": "2"}, flags={"backend.base_url": "http://h:3"},
                     flag_names={"backend.base_url": "--backend-url"})
    assert [line.partition(": there are several")[0] for line in found] == [
        "environment KVSTREAM_BACKEND__SEATS: backend.seats", "--backend-url: backend.base_url"]
    assert all("[[backend]]" in line for line in found)


def test_both_forms_in_one_file(write: Any) -> None:
    for text in ("[backend]\nseats = 1\n" + TWO, TWO + "\n[backend]\nseats = 1\n"):
        path = write(text)
        (problem,) = problems(path=path)
        assert problem.startswith(f"{path}: line ") and "both [backend] and [[backend]]" in problem
    (problem,) = problems(path=write("[server\n[backend]\n"))
    assert "not TOML" in problem


def test_what_is_wrong_in_a_table_has_its_number(write: Any) -> None:
    tables = ("sets = 1", 'seats = "x"\nname = "Big"', 'aliases = ["a=b", "a=c"]')
    path = write("".join(f"[[backend]]\n{table}\n" for table in tables))
    assert problems(path=path) == [
        f"{path}: backend[1].sets: unknown key, did you mean seats?",
        f'{path}: backend[2].seats: must be a whole number, not "x"',
        f'{path}: backend[2].name: must be 1 to 32 of a-z, 0-9, _ and -, not "Big"',
        f'{path}: backend[3].aliases: has "a" twice']
    for text in ("backend = []\n", "backend = [1]\n", 'backend = "x"\n'):
        (problem,) = problems(path=write(text))
        assert problem.endswith("backend: must be a table")
    assert "at most 64" in problems(path=write("[[backend]]\n" * 65))[0]


@pytest.mark.parametrize("alias", ["a", "=b", "a=", " a=b", "a = b", ""])
def test_aliases_that_are_none(alias: str) -> None:
    (problem,) = problems(flags={"backend.aliases": (alias,)})
    assert "alias=model" in problem


def row(number: int, **keys: Any) -> str:
    keys = {"base_url": f"http://h:{number}"} | keys
    return "[[backend]]\n" + "".join(f"{name} = {as_toml(value)}\n" for name, value in keys.items())


@pytest.mark.parametrize(("text", "told"), [
    (row(1, name="a") + row(2, name="a"), 'backend[2].name: "a" is that of backend[1] too'),
    (row(1) + row(1), "backend[2].base_url: http://h:1 is that of backend[1] too"),
    (row(1) + row(2, base_url="http://h:1/v1/"), "backend[2].base_url: http://h:1 is that of backend[1] too"),
    (row(1) + '[[backend]]\ntype = "openai"\n', "backend[2].base_url: an openai backend has no default address"),
    (row(1) + row(2, base_url="http://localhost:8080"), "backend[2].base_url: http://localhost:8080 is where KVStream"),
])
def test_what_must_hold_between_them(text: str, told: str, write: Any) -> None:
    (problem,) = problems(path=write(text))
    assert problem.startswith(told)


@pytest.mark.parametrize(("host", "port", "url", "own"), [
    ("127.0.0.1", 8080, "http://127.0.0.1:8080", True), ("127.0.0.1", 8080, "http://localhost:8080/v1", True),
    ("0.0.0.0", 80, "http://127.0.0.1", True), ("kv.example", 9000, "http://KV.example:9000", True),
    ("127.0.0.1", 8080, "http://127.0.0.1:8081", False), ("127.0.0.1", 8080, "http://10.0.0.1:8080", False),
    ("127.0.0.1", 0, "http://127.0.0.1:1", False)])
def test_case_57_its_own_address_is_no_backend(host: str, port: int, url: str, own: bool) -> None:
    flags = {"server.host": host, "server.port": port, "backend.base_url": url}
    if own:
        (problem,) = problems(flags=flags)
        assert problem.startswith("backend.base_url: ") and "KVStream itself" in problem
    else:
        load_config(env={}, flags=flags)


def test_names_are_made_unique() -> None:
    config = Config(more_backends=(BackendConfig(name="llamacpp-2"), BackendConfig(), BackendConfig(type="openai")))
    assert [b.name for b in config.backends] == ["llamacpp", "llamacpp-2", "llamacpp-3", "openai"]
    assert attrs.evolve(config, backend=config.backends[0]).backends == config.backends


def test_the_embedded_server_is_the_first_beside_tables(write: Any) -> None:
    write(row(1) + row(2))
    config = load_config(env={}, flags={"embedded.model": "m.gguf"}).config
    assert [(b.name, b.base_url) for b in config.backends] == [
        ("embedded", ""), ("llamacpp", "http://h:1"), ("llamacpp-2", "http://h:2")]
    write(row(1))
    config = load_config(env={}, flags={"embedded.model": "m.gguf"}).config
    assert [b.name for b in config.backends] == ["embedded", "llamacpp"]
    (problem,) = problems(flags={"embedded.model": "m.gguf", "backend.seats": 2})
    assert "several backends" in problem
    assert check_together(Config(embedded=EmbeddedConfig(model="m.gguf"), more_backends=(BackendConfig(),))) == []


def test_they_are_shown_and_can_be_read_back(write: Any) -> None:
    write(TWO)
    loaded = load_config(env={})
    shown = config_show.effective_toml(loaded)
    assert "s3cret" not in shown and shown.count("[[backend]]") == 2 and "[backend]\n" not in shown
    assert "[[backend]]  # openai" in shown
    rows = tomli.loads(shown)["backend"]
    assert [row["seats"] for row in rows] == [0, 3] and rows[0]["api_key"] == SECRET_SHOWN
    again = load_config(write(shown.replace(SECRET_SHOWN, "s3cret")), env={}).config
    assert again == loaded.config
    value = json.loads(config_show.effective_json(loaded))["values"]
    assert value["backend[2].seats"] == {"value": 3, "origin": "kvstream.toml", "unit": "requests"}
    assert value["backend[1].api_key"]["value"] == SECRET_SHOWN and "backend.seats" not in value


def test_the_shown_example_is_a_good_configuration(write: Any) -> None:
    lines = [line.removeprefix("#   ") for line in config_show.BACKENDS_EXAMPLE.splitlines()
             if line.startswith("#   ") and ("=" in line or "[[" in line)]
    assert [b.name for b in load_config(write("\n".join(lines)), env={}).config.backends] == ["big", "small"]


def test_the_same_sources_can_be_read_again(write: Any) -> None:
    path = write(row(1))
    loaded = load_config(path, env={"KVSTREAM_SERVER__PORT": "1"}, flags={"logging.level": "DEBUG"})
    assert loaded.again is not None
    write(row(1) + row(2))
    again = loaded.again().config
    assert (len(again.backends), again.server.port, again.logging.level) == (2, 1, "DEBUG")
    write("[")
    with pytest.raises(ConfigError):
        loaded.again()
