"""The configuration: where a value comes from, what is refused, and how it is said."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any, get_origin

import attrs
import pytest
import tomli
from hypothesis import given
from hypothesis import strategies as st

from kvstream import config_show
from kvstream.config import KEYS, KEYS_BY_PATH, SECTIONS, BackendConfig, Config, Loaded, load_config
from kvstream.config_keys import SECRET_SHOWN, Key, as_toml
from kvstream.config_load import doubtful_variables
from kvstream.errors import ConfigError

ROOT = Path(__file__).resolve().parents[1]

BY_PATH = [pytest.param(about, id=about.path) for about in KEYS]
WORDS = {  # values for keys that are strings but not any string
    "server.host": ("0.0.0.0", "::1", "kv.example"),
    "server.cors_origins": (("https://a.example",), ("http://b.example:3000", "app://c"), ("*",)),
    "server.allowed_hosts": (("a.example",), ("b.example", "c.example"), ("10.0.0.1",)),
    "prefix.volatile": (("dates",), ("times", "dates"), ("total_tokens",)),
    "prefix.normalize": (("dates",), ("times", "dates"), ("total_tokens",)),
    "backend.base_url": ("http://10.0.0.1:1", "https://h.example/v1", "http://[::1]:9"),
    "embedded.batch_tokens": (32, 64, 128),
    "server.port": (9001, 9002, 9003),
    "backend.aliases": (("a=m",), ("b=m", "c=m=n"), ("d=m",)),
    "memory.num_gpu_blocks": (7, 8, 9),
    "memory.block_size": (8, 32, 64),
    "memory.watermark": (0.1, 0.2, 0.3),
}


def values(about: Key) -> tuple[Any, Any, Any]:
    """Three allowed values that are not the default, different from each other as far as the key allows."""
    if about.path in WORDS:
        return WORDS[about.path]
    if about.choices:
        others = [word for word in about.choices if word != about.default] or [about.default]
        return others[0], others[1 % len(others)], others[2 % len(others)]
    if about.type is bool:
        return not about.default, about.default, not about.default
    if about.type in (int, float):
        return about.default + 1, about.default + 2, about.default + 3
    if about.type is str:
        return "one", "two", "three"
    assert about.type == tuple[str, ...], about
    return ("one",), ("two", "three"), ("four",)


def env_text(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return ",".join(value) if isinstance(value, tuple) else str(value)


def base_flags(about: Key) -> dict[str, object]:
    """embedded.model and backend.type = openai each need a companion, or they are refused together."""
    return {"backend.base_url": "http://h:1"} if about.path == "backend.type" else {}


def problems(**sources: Any) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load_config(**{"env": {}, **sources})
    return caught.value.problems


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Writes kvstream.toml into a working directory that is empty but for some files of keys."""
    monkeypatch.chdir(tmp_path)
    for name in ("one", "two", "three"):
        (tmp_path / name).write_text(f'[[key]]\nname = "{name}"\nkey = "kvs-{name}"\n', "utf-8")

    def write(text: str | bytes, name: str = "kvstream.toml") -> Path:
        path = tmp_path / name
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return path

    return write


# --- precedence -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("about", BY_PATH)
def test_flag_over_env_over_file_over_default(about: Key, write: Any) -> None:
    in_file, in_env, in_flag = values(about)
    env = {about.env: env_text(in_env)}
    flags = base_flags(about)

    loaded = load_config(env={}, flags=flags)
    assert (loaded.config.get(about.path), loaded.origins[about.path]) == (about.default, "default")

    write(f"[{about.section}]\n{about.name} = {as_toml(in_file)}\n")
    loaded = load_config(env={}, flags=flags)
    assert (loaded.config.get(about.path), loaded.origins[about.path]) == (in_file, "kvstream.toml")

    loaded = load_config(env=env, flags=flags)
    assert (loaded.config.get(about.path), loaded.origins[about.path]) == (in_env, f"env {about.env}")

    loaded = load_config(env=env, flags={**flags, about.path: in_flag}, flag_names={about.path: "--it"})
    assert (loaded.config.get(about.path), loaded.origins[about.path]) == (in_flag, "flag --it")
    assert type(loaded.config.get(about.path)) is type(in_flag)


@pytest.mark.parametrize("about", BY_PATH)
def test_env_alone_and_flag_over_file(about: Key, write: Any) -> None:
    in_file, in_env, in_flag = values(about)
    loaded = load_config(env={about.env: env_text(in_env)}, flags=base_flags(about))
    assert loaded.config.get(about.path) == in_env
    write(f"[{about.section}]\n{about.name} = {as_toml(in_file)}\n")
    loaded = load_config(env={}, flags={**base_flags(about), about.path: in_flag})
    assert loaded.config.get(about.path) == in_flag


def test_one_key_set_leaves_all_others_at_their_defaults(write: Any) -> None:
    write("[scheduler]\nmax_queue = 5\n")
    loaded = load_config(env={})
    assert loaded.config == attrs.evolve(Config(), scheduler=attrs.evolve(Config().scheduler, max_queue=5))
    assert {path for path, origin in loaded.origins.items() if origin != "default"} == {"scheduler.max_queue"}


def test_a_named_file_replaces_the_one_in_the_working_directory(write: Any) -> None:
    write("[server]\nport = 1111\n")
    other = write("[logging]\nlevel = 'DEBUG'\n", "other.toml")
    loaded = load_config(other, env={})
    assert (loaded.config.server.port, loaded.config.logging.level, loaded.path) == (8080, "DEBUG", other)


def test_no_file_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    loaded = load_config(env={})
    assert (loaded.config, loaded.path) == (Config(), None)


def test_env_defaults_to_the_environment(write: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVSTREAM_SERVER__PORT", "9001")
    assert load_config().config.server.port == 9001


@pytest.mark.parametrize(("text", "value"), [
    ("true", True), ("TRUE", True), ("1", True), ("yes", True), ("on", True),
    ("false", False), ("0", False), ("No", False), ("off", False)])
def test_booleans_in_the_environment(text: str, value: bool) -> None:
    assert load_config(env={"KVSTREAM_SCHEDULER__BACKFILL": text}).config.scheduler.backfill is value


@pytest.mark.parametrize(("text", "value"), [
    ("", ()), ("a", ("a",)), ("a, b", ("a", "b")), ('["a", "b,c"]', ("a", "b,c")), ("[]", ())])
def test_lists_in_the_environment(text: str, value: tuple[str, ...]) -> None:
    assert load_config(env={"KVSTREAM_EMBEDDED__EXTRA_ARGS": text}).config.embedded.extra_args == value


def test_auto_and_a_number_are_both_pages() -> None:
    assert load_config(env={"KVSTREAM_MEMORY__NUM_GPU_BLOCKS": "auto"}).config.memory.num_gpu_blocks == "auto"
    assert load_config(env={"KVSTREAM_MEMORY__NUM_GPU_BLOCKS": "64"}).config.memory.num_gpu_blocks == 64


def test_whole_seconds_are_seconds(write: Any) -> None:
    write("[server]\ndrain_s = 5\n")
    drain_s = load_config(env={}).config.server.drain_s
    assert drain_s == 5.0 and type(drain_s) is float


# --- refusals ---------------------------------------------------------------------------------------------------------


def wrong_types(about: Key) -> list[str]:
    """TOML values of another type, each close enough that a lenient reader would take it."""
    tables = ["{}", "[[]]", "2026-01-01"]
    if about.type is bool:
        return ["1", "0", '"true"', "1.0", *tables]
    if about.type is int:
        return ["16.9", "16.0", '"16"', "true", "[16]", *tables]
    if about.type is float:
        return ['"1.5"', "true", "[1.5]", *tables]
    if about.path == "memory.num_gpu_blocks":
        return ["64.0", '"64"', '"Auto"', "true", '["auto"]', *tables]
    if about.type is str or get_origin(about.type) is not tuple:
        return ["1", "true", '["a"]', *tables]
    return ['"a"', "[1]", '["a", 1]', "true", *tables]


@pytest.mark.parametrize("about", BY_PATH)
def test_wrong_types_in_a_file(about: Key, write: Any) -> None:
    for text in wrong_types(about):
        path = write(f"[{about.section}]\n{about.name} = {text}\n")
        (problem,) = problems(path=path)
        assert problem.startswith(f"{path}: {about.path}: must be "), text


@pytest.mark.parametrize("about", [p for p in BY_PATH if p.values[0].type in (int, float, bool)])
@pytest.mark.parametrize("text", ["", "x", "1.5.2", "0x10", "ten"])
def test_wrong_text_in_the_environment(about: Key, text: str) -> None:
    (problem,) = problems(env={about.env: text})
    assert problem.startswith(f"environment {about.env}: {about.path}: must be ")


@pytest.mark.parametrize("about", [p for p in BY_PATH if p.values[0].type in (int, float)])
def test_numbers_out_of_range(about: Key, write: Any) -> None:
    out = ["-1", str(2**53 + 1)]
    out += ["inf", "-inf", "nan", "1e300", "1" + "0" * 400] if about.type is float else ["1" + "0" * 400]
    if about.low:
        out.append("0")
    if about.high is not None:
        out.append(as_toml(about.type(about.high + 1)))
    for text in out:
        (problem,) = problems(path=write(f"[{about.section}]\n{about.name} = {text}\n"))
        assert f": {about.path}: " in problem, text


@pytest.mark.parametrize("about", [p for p in BY_PATH if p.values[0].type in (int, float) and p.values[0].low])
def test_the_lower_bound_itself_is_allowed(about: Key) -> None:
    assert load_config(env={}, flags={about.path: about.type(about.low)}).config.get(about.path) == about.low


@pytest.mark.parametrize("about", [p for p in BY_PATH if p.values[0].choices])
def test_words_outside_the_choices(about: Key) -> None:
    (problem,) = problems(env={about.env: "Nonsense"})
    assert all(f'"{word}"' in problem for word in about.choices) and '"Nonsense"' in problem


@pytest.mark.parametrize("size", [0, 3, 12, 1025, 2048, -16])
def test_block_size_is_a_power_of_two_up_to_1024(size: int) -> None:
    assert problems(flags={"memory.block_size": size})
    assert load_config(env={}, flags={"memory.block_size": 1024}).config.memory.block_size == 1024


@pytest.mark.parametrize("url", [
    "h:8081", "ftp://h", "http://", "http://h:99999", "http://h:0", "http://h:x", " http://h", "http://h?x=1", "http://h#f",
    "http://me:pw@h", "http://[::1"])
def test_addresses_that_are_none(url: str) -> None:
    (problem,) = problems(flags={"backend.base_url": url}, flag_names={"backend.base_url": "--backend-url"})
    assert problem.startswith("--backend-url: backend.base_url: must ")
    assert "pw" not in problem


@pytest.mark.parametrize("key", ["a\nb: c", "ü", " x", "x\r"])
def test_a_key_that_would_break_a_header(key: str) -> None:
    (problem,) = problems(env={"KVSTREAM_BACKEND__API_KEY": key})
    assert key not in problem


def test_unknown_keys_are_told_with_the_nearest_one(write: Any) -> None:
    path = write("""
top = 1
prot = 2
port = 3
backend = "ollama"
[scheduler]
max_quue = 1
zzz = 1
block_size = 16
[shceduler]
max_queue = 1
[qqq]
x = 1
[server.port]
x = 1
""")
    assert problems(path=path) == [
        f"{path}: top: unknown key",
        f"{path}: prot: unknown key",
        f"{path}: port: unknown key, did you mean server.port?",
        f"{path}: backend: must be a table",
        f"{path}: scheduler.max_quue: unknown key, did you mean max_queue?",
        f"{path}: scheduler.zzz: unknown key",
        f"{path}: scheduler.block_size: unknown key, did you mean memory.block_size?",
        f"{path}: shceduler: unknown section, did you mean scheduler?",
        f"{path}: qqq: unknown section",
        f"{path}: server.port: must be a whole number, not a table",
    ]


def test_unknown_variables() -> None:
    env = {"KVSTREAM_SERVER__PROT": "1", "KVSTREAM_SEVER__PORT": "1", "KVSTREAM_SERVER__PORT__X": "1",
           # Not ours to judge: single words, other programs, and an empty section.
           "KVSTREAM_BACKEND": "x", "KVSTREAM_FILE": "x", "OTHER__X": "1", "KVSTREAM___X": "1"}
    assert problems(env=env) == [
        "environment KVSTREAM_SERVER__PORT__X: server.port__x: unknown key, did you mean port?",
        "environment KVSTREAM_SERVER__PROT: server.prot: unknown key, did you mean port?",
        "environment KVSTREAM_SEVER__PORT: sever.port: unknown section, did you mean server?",
    ]


def test_variables_that_look_like_keys() -> None:
    env = {"KVSTREAM_PORT": "1", "KVSTREAM_SERVER_PORT": "1", "KVSTREAM_LOG_LEVEL": "x", "KVSTREAM_STALL_S": "1",
           "KVSTREAM_SERVER__PORT": "1"}
    assert doubtful_variables(env) == [
        "environment KVSTREAM_LOG_LEVEL: sets nothing, did you mean KVSTREAM_LOGGING__LEVEL?",
        "environment KVSTREAM_PORT: sets nothing, did you mean KVSTREAM_SERVER__PORT?",
        "environment KVSTREAM_SERVER_PORT: sets nothing, did you mean KVSTREAM_SERVER__PORT?",
        "environment KVSTREAM_STALL_S: sets nothing, did you mean KVSTREAM_SERVER__STALL_S or"
        " KVSTREAM_UPSTREAM__STALL_S?",
    ]
    others = {"KVSTREAM_BACKEND": "x", "KVSTREAM_BACKEND_URL": "x", "KVSTREAM_MODEL": "x", "KVSTREAM_TRACEBACK": "1",
              "KVSTREAM_GRAFANA_PORT": "1", "KVSTREAM_FILE": "x", "KVSTREAM_": "x", "KVSTREAM": "x", "PORT": "1",
              "KVSTREAM_PORT": "tcp://10.0.0.1:8080", "KVSTREAM_SERVICE_PORT": "8080"}
    assert doubtful_variables(others) == []


def test_a_fraction_is_no_unit_to_say() -> None:
    (problem,) = problems(flags={"memory.watermark": 3.0}, flag_names={"memory.watermark": "--it"})
    assert problem.endswith("must be at most 0.5, not 3.0")
    (problem,) = problems(flags={"server.stall_s": -1.0}, flag_names={"server.stall_s": "--it"})
    assert "seconds" in problem


def test_every_problem_of_every_source_at_once(write: Any) -> None:
    path = write('[server]\nport = "x"\nprot = 1\n[memory]\nblock_size = 0\n')
    found = problems(path=path, env={"KVSTREAM_SERVER__PORT": "y", "KVSTREAM_LOGGING__LEVEL": "LOUD"},
                     flags={"server.port": "z", "scheduler.max_batch_size": "0"})
    assert [line.split(": ")[-2] for line in found] == [
        "server.port", "server.prot", "memory.block_size", "logging.level", "server.port", "server.port",
        "scheduler.max_batch_size"]


def test_a_mistake_that_a_stronger_source_hides_is_still_told(write: Any) -> None:
    path = write('[server]\nport = "x"\n')
    (problem,) = problems(path=path, flags={"server.port": 9000})
    assert "server.port" in problem


@pytest.mark.parametrize(("text", "said"), [
    ("[server]\nport = 1\n[server]\n", "line 3, column 8: not TOML: [server] is there a second time"),
    ("[a.b]\n[a.b]\n", "line 2, column 5: not TOML: [a.b] is there a second time"),
    ("[server]\nport = 1\nport = 2\n", "not TOML: this key or table is there already"),
    ("[logging]\nlevel = INFO\n", "line 2, column 9: not TOML: this is no value; text is written in quotes"),
])
def test_the_parsers_words_are_told_in_plain_ones(text: str, said: str, write: Any) -> None:
    (problem,) = problems(path=write(text))
    assert said in problem


@pytest.mark.parametrize(("text", "line"), [
    ("[server]\nport = \n", 2), ("[server\n", 1), ("[server]\nport = 1\nport = 2\n", 3), ('a = "\\q"\n', 1),
    ("[server]\n\n\nport == 1", 4)])
def test_a_syntax_error_has_its_line(text: str, line: int, write: Any) -> None:
    path = write(text)
    (problem,) = problems(path=path)
    assert problem.startswith(f"{path}: line {line}, column ") and "not TOML" in problem


def test_a_syntax_error_does_not_hide_the_environment(write: Any) -> None:
    assert len(problems(path=write("["), env={"KVSTREAM_SERVER__PORT": "x"})) == 2


def test_files_that_cannot_be_read(write: Any, tmp_path: Path) -> None:
    assert "No such file" in problems(path=tmp_path / "missing.toml")[0]
    assert "cannot be read" in problems(path=tmp_path)[0]
    path = write(b"[server]\n# \xff\n")
    assert problems(path=path) == [f"{path}: line 2: is not UTF-8"]
    assert "larger than" in problems(path=write("#" * (2**20 + 1)))[0]
    assert problems(path=write("x = " + "[" * 50_000))
    assert problems(path=write("[server]\nport = " + "9" * 10_000))
    assert all(len(problem) < 300 for problem in problems(path=write("[server]\nport = " + "9" * 4_000)))
    assert load_config(write(b"\xef\xbb\xbf[server]\r\nport = 1\r\n"), env={}).config.server.port == 1


def test_openai_needs_an_address() -> None:
    (problem,) = problems(flags={"backend.type": "openai"})
    assert problem.startswith("backend.base_url: an openai backend has no default address")
    assert load_config(env={}, flags={"backend.type": "ollama"}).config.backend.url == "http://127.0.0.1:11434"
    config = load_config(env={}, flags={"backend.type": "openai", "backend.base_url": "http://h:8000/v1/"}).config
    assert config.backend.url == "http://h:8000/v1"


def test_llamacpp_has_an_address() -> None:
    assert Config().backend.url == "http://127.0.0.1:8081"
    assert BackendConfig(base_url="http://h:1/").url == "http://h:1"


def test_an_embedded_server_and_another_backend_exclude_each_other() -> None:
    assert problems(flags={"embedded.model": "m.gguf", "backend.base_url": "http://h:1"}) == [
        "embedded.model: starts a server of its own, but backend.base_url names one; set only one, or make that "
        "one a [[backend]]"]
    assert problems(flags={"embedded.model": "m.gguf", "backend.type": "openai"}) == [
        'embedded.model: starts a llama.cpp server, but backend.type is "openai"']


# --- secrets ----------------------------------------------------------------------------------------------------------


def test_a_secret_is_never_shown(write: Any) -> None:
    secret = "sk-topsecret"
    loaded = load_config(env={"KVSTREAM_BACKEND__API_KEY": secret})
    assert loaded.config.backend.api_key == secret
    for shown in (repr(loaded), str(loaded.config), config_show.effective_toml(loaded),
                  config_show.effective_json(loaded)):
        assert secret not in shown and SECRET_SHOWN in shown
    for text in (f'[backend]\napi_key = ["{secret}"]\n', f'[backend]\napi_key = "{secret}\\u0000"\n',
                 f'[backend]\napi_kye = "{secret}"\n', f'backend = "{secret}"\n', f'[backend]\napi_key = "{secret}'):
        assert secret not in "".join(problems(path=write(text)))


def test_no_secret_is_shown_as_none() -> None:
    assert SECRET_SHOWN not in repr(Config())
    assert 'api_key = ""' in config_show.effective_toml(load_config(env={}))


# --- the documents ----------------------------------------------------------------------------------------------------


def test_the_shipped_file_is_the_generated_one() -> None:
    """After a change to a key: ``just config`` (kvstream check-config --template > kvstream.toml)."""
    assert (ROOT / "kvstream.toml").read_text("utf-8") == config_show.commented_toml()


def test_the_shipped_file_has_every_key_with_its_default_and_no_other(write: Any) -> None:
    # Read without the generator: uncomment what looks like a setting, and let TOML and the loader judge.
    text = (ROOT / "kvstream.toml").read_text("utf-8")
    assert tomli.loads(text) == {section: {} for section in SECTIONS}
    full = tomli.loads(re.sub(r"(?m)^#(\w+ = )", r"\1", text))
    assert {f"{section}.{name}" for section, table in full.items() for name in table} == set(KEYS_BY_PATH)
    path = write(re.sub(r"(?m)^#(\w+ = )", r"\1", text))
    loaded = load_config(path, env={})
    assert loaded.config == Config() and set(loaded.origins.values()) == {str(path)}


def test_the_effective_values_can_be_read_back(write: Any) -> None:
    loaded = load_config(env={}, flags={"embedded.extra_args": ('--a "b"\\', "c\n"), "scheduler.backfill": False})
    assert load_config(write(config_show.effective_toml(loaded)), env={}).config == loaded.config


@pytest.mark.parametrize("about", BY_PATH)
def test_every_key_says_what_it_means(about: Key) -> None:
    assert about.description[0].isupper() and about.description.endswith((".", ")"))
    assert about.problem(about.default) is None
    counted = about.type in (int, float) and about.path != "server.port"
    assert bool(about.unit) == counted or about.path == "memory.num_gpu_blocks"
    unit_of_name = {"_s": "seconds", "_bytes": "bytes", "_tokens": "tokens", "_seconds": "seconds"}
    for ending, unit in unit_of_name.items():
        if about.name.removesuffix("_max").endswith(ending):
            assert about.unit == unit


def test_the_tree_is_frozen_and_can_be_hashed() -> None:
    with pytest.raises(attrs.exceptions.FrozenInstanceError):
        Config().server.port = 1  # type: ignore[misc]
    assert hash(Config()) == hash(Config())
    with pytest.raises(TypeError):
        Loaded.of(Config()).origins["server.port"] = "x"  # type: ignore[index]


# --- anything at all --------------------------------------------------------------------------------------------------

toml_values = st.recursive(
    st.one_of(st.booleans(), st.integers(-2**70, 2**70), st.floats(), st.text(max_size=8)),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=4), inner, max_size=3)),
    max_leaves=6)


@given(st.dictionaries(st.sampled_from(sorted(KEYS_BY_PATH)), toml_values, max_size=6))
def test_any_value_is_taken_as_it_is_or_refused(given_values: dict[str, Any]) -> None:
    try:
        loaded = load_config(env={}, path=ROOT / "kvstream.toml", flags=given_values)
    except ConfigError as error:
        assert error.problems
        return
    for path, value in given_values.items():
        taken = loaded.config.get(path)
        if not isinstance(value, str) or KEYS_BY_PATH[path].type is str:  # text is read as the key's type, as in env
            assert taken == (tuple(value) if isinstance(value, list) else value)
        assert not isinstance(taken, float) or math.isfinite(taken)


@given(st.dictionaries(st.sampled_from([about.env for about in KEYS]), st.text(max_size=12), max_size=4))
def test_any_text_in_the_environment_is_read_or_refused(env: dict[str, str]) -> None:
    try:
        load_config(ROOT / "kvstream.toml", env=env)
    except ConfigError as error:
        assert error.problems
