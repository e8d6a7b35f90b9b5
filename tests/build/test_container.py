"""The container's files without an engine: what compose sets is read by KVStream, nothing is open to the network, no
password comes by itself. What an image does when it runs, ``just test-image`` shows."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from kvstream.config import KEYS_BY_PATH, ServerConfig, load_config
from kvstream.config_load import ENV_OTHERS, doubtful_variables
from kvstream.errors import ConfigError
from kvstream.gateway import alive
from tests.build.recipes import BUILD, ROOT
from tests.test_config import env_text, values

HERE = BUILD / "container"
COMPOSE_TEXT = (HERE / "compose.yaml").read_text("utf-8")
COMPOSE: dict[str, Any] = yaml.safe_load(COMPOSE_TEXT)
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
DOCKERFILE = (HERE / "Dockerfile").read_text("utf-8")
ENV_OF_KEYS = {about.env: about for about in KEYS_BY_PATH.values()}

# A part of the compose specification: what is used here, spelt as it must be. The real parsers were tried by hand
# (docker compose 2.40, podman-compose 1.6); what they accept and ignore, a misspelt key say, is found here.
WORDS = {"type": "array", "items": {"type": "string"}, "minItems": 1}
SCHEMA = {
    "type": "object", "required": ["services"], "additionalProperties": False,
    "properties": {
        "name": {"type": "string"},
        "volumes": {"additionalProperties": {"type": "null"}},
        "services": {"additionalProperties": {"type": "object", "additionalProperties": False, "properties": {
            "image": {"type": "string"}, "profiles": WORDS, "command": WORDS, "entrypoint": WORDS, "volumes": WORDS,
            "build": {"required": ["context", "dockerfile"], "maxProperties": 2},
            "ports": {"type": "array", "items": {"type": "string", "pattern": r"^(\S+:)?\S+:\d+$"}},
            "environment": {"type": "object", "additionalProperties": {"type": "string"}},
            "env_file": {"type": "array", "items": {"required": ["path", "required"], "maxProperties": 2}},
            "extra_hosts": WORDS, "cap_drop": WORDS, "security_opt": WORDS,
            "depends_on": {"anyOf": [WORDS, {"additionalProperties": {"properties": {"condition": {"enum": [
                "service_started", "service_healthy", "service_completed_successfully"]}}}}]},
            "healthcheck": {"required": ["test"]},
            "read_only": {"type": "boolean"}, "pids_limit": {"type": "integer"},
            "stop_grace_period": {"type": "string", "pattern": r"^\d+s$"},
            "restart": {"type": "string", "pattern": r"^(no|always|unless-stopped|on-failure(:\d+)?)$"},
            "pull_policy": {"enum": ["always", "never", "missing", "build"]},
            "ulimits": {"type": "object"}, "deploy": {"required": ["resources"]},
        }}},
    },
}


def filled(text: str, env: Mapping[str, str]) -> str:
    """``${NAME:-default}`` and ``$$``, as compose does it. Nothing else is used."""
    assert not re.search(r"\$(?!\$|\{\w+:-[^{}]*\})", text.replace("$$", "")), text
    made = re.sub(r"(?<!\$)\$\{(\w+):-([^{}]*)\}", lambda found: env.get(found[1]) or found[2], text)
    return made.replace("$$", "$")


def environment(service: str, env: Mapping[str, str]) -> dict[str, str]:
    return {name: filled(value, env) for name, value in SERVICES[service]["environment"].items()}


def image_environment() -> dict[str, str]:
    """What the Dockerfile sets."""
    block = re.search(r"(?m)^ENV ((?:.*\\\n)*.*)$", DOCKERFILE)
    assert block is not None
    return dict(word.split("=", 1) for word in shlex.split(block[1].replace("\\\n", " ")))


# --- the variables ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["compose.yaml", "compose.gpu.yaml"])
def test_the_files_are_compose_files(name: str) -> None:
    jsonschema.validate(yaml.safe_load((HERE / name).read_text("utf-8")), SCHEMA)


@pytest.mark.parametrize(("said", "path", "value"), [
    ({}, "backend.type", "ollama"),
    ({}, "backend.base_url", "http://ollama:11434"),
    ({"KVSTREAM_BACKEND": "llamacpp"}, "backend.type", "llamacpp"),
    ({"KVSTREAM_BACKEND": "openai", "KVSTREAM_BACKEND_URL": "http://host.docker.internal:1"}, "backend.base_url",
     "http://host.docker.internal:1"),
    ({"KVSTREAM_MODEL": "qwen3"}, "backend.model", "qwen3"),
    ({"OLLAMA_NUM_PARALLEL": "4"}, "backend.seats", 4),
    ({}, "backend.seats", 0),
    ({}, "server.public_metrics", True),
    ({"KVSTREAM_SERVER__ALLOWED_HOSTS": "kvstream,my.box"}, "server.allowed_hosts", ("kvstream", "my.box")),
])
def test_what_compose_is_told_reaches_the_configuration(said: dict[str, str], path: str, value: Any) -> None:
    """The first names are those of the seed, whose own compose file set variables that nobody read."""
    env = image_environment() | environment("kvstream", said)
    loaded = load_config(env=env)
    assert loaded.config.get(path) == value
    assert loaded.origins[path] == f"env {KEYS_BY_PATH[path].env}"
    assert doubtful_variables(env) == []


def test_a_backend_that_there_is_not_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match='"llamacpp", "ollama" or "openai"'):
        load_config(env=environment("kvstream", {"KVSTREAM_BACKEND": "foundry"}))


def shipped_variables() -> set[str]:
    files = [*(HERE / name for name in ("compose.yaml", "compose.gpu.yaml", "Dockerfile")), ROOT / "README.md",
             ROOT / "SECURITY.md", *(BUILD / "systemd").glob("*.service"), *(BUILD / "systemd").glob("*.conf")]
    text = "".join(path.read_text("utf-8") for path in files)
    return set(re.findall(r"\bKVSTREAM_[A-Z0-9_]*[A-Z0-9]\b", text)) - {"KVSTREAM_SECTION__KEY"}


def test_every_variable_that_is_shipped_is_read_by_somebody() -> None:
    """Keys by the configuration; the others by compose, which passes them on, or by the program itself."""
    keys = {name for name in shipped_variables() if "__" in name}
    assert {"KVSTREAM_BACKEND__TYPE", "KVSTREAM_SERVER__HOST"} <= keys <= set(ENV_OF_KEYS)
    for about in (ENV_OF_KEYS[name] for name in keys):
        value = next(value for value in values(about) if value != about.default)
        changed = load_config(env={about.env: env_text(value)}, together=False).config
        assert changed.get(about.path) == value, about
    read_by_compose = set(re.findall(r"\$\{(KVSTREAM_\w+):-", COMPOSE_TEXT))
    others = {f"KVSTREAM_{name}" for name in ENV_OTHERS} | {"KVSTREAM_BENCH_API_KEY"}
    assert shipped_variables() - keys <= read_by_compose | others


def test_each_variable_of_compose_has_an_effect_and_is_explained() -> None:
    explained = set(re.findall(r"(?m)^#   ([A-Z_]+) ", COMPOSE_TEXT))
    keys = {f"KVSTREAM_SERVER__{name}" for name in ("ALLOWED_HOSTS", "PUBLIC_METRICS")}  # explained where they are set
    text = json.dumps(SERVICES)
    used = set(re.findall(r"\$\{(\w+):-", text))
    assert used - keys == explained
    for name in used:
        assert filled(text, {}) != filled(text, {name: "other"}), name


def test_what_the_image_sets_holds_for_any_command() -> None:
    env = image_environment()
    loaded = load_config(env=env)
    assert (loaded.config.server.host, loaded.config.server.port) == ("0.0.0.0", 8080)
    assert alive.url_of(loaded.config.server) == "http://127.0.0.1:8080"  # where HEALTHCHECK asks
    assert f"EXPOSE {loaded.config.server.port}\n" in DOCKERFILE
    assert f"{env['XDG_STATE_HOME']}/kvstream" == SERVICES["kvstream"]["volumes"][0].split(":")[1]


# --- what is open, and what is closed ---------------------------------------------------------------------------------


def test_every_port_is_published_on_loopback() -> None:
    ports = [filled(port, {}) for service in SERVICES.values() for port in service.get("ports", ())]
    assert sorted(ports) == ["127.0.0.1:3000:3000", "127.0.0.1:8080:8080", "127.0.0.1:9090:9090"]
    assert "ports" not in SERVICES["ollama"]  # past KVStream nobody is to reach it


def test_kvstream_has_no_more_rights_than_it_needs() -> None:
    ours = SERVICES["kvstream"]
    assert ours["read_only"] is True and ours["cap_drop"] == ["ALL"]
    assert all("no-new-privileges:true" in service["security_opt"] for service in SERVICES.values())
    assert not any("privileged" in service or "docker.sock" in str(service) for service in SERVICES.values())
    user = re.findall(r"(?m)^USER (\d+):\d+$", DOCKERFILE)
    assert user and int(user[0]) > 0
    assert DOCKERFILE.index("\nUSER ") > DOCKERFILE.rindex("\nRUN ")


def test_a_drain_is_shorter_than_what_docker_waits() -> None:
    assert int(SERVICES["kvstream"]["stop_grace_period"][:-1]) > ServerConfig().drain_s + 5
    assert "STOPSIGNAL SIGTERM\n" in DOCKERFILE


def test_the_health_check_is_of_the_process_alone() -> None:
    found = re.search(r'HEALTHCHECK .*--timeout=(\d+)s .*CMD \["kvstream", "health", "--live"\]', DOCKERFILE)
    assert found is not None and int(found[1]) > alive.ANSWER_S_MAX


def test_of_the_repository_only_the_file_gets_into_an_image() -> None:
    lines = [line for line in (ROOT / ".dockerignore").read_text("utf-8").splitlines() if not line.startswith("#")]
    copied = re.findall(r"(?m)^COPY (?:--chmod=\S+ )?(?!--from)(\S+)", DOCKERFILE)
    assert lines == ["*", *(f"!{path}" for path in copied)] == ["*", "!dist/kvstream"]
    build = SERVICES["kvstream"]["build"]
    assert (HERE / build["context"]).resolve() == ROOT and (ROOT / build["dockerfile"]) == HERE / "Dockerfile"


def test_what_is_mounted_is_there() -> None:
    for service in SERVICES.values():
        for volume in service.get("volumes", ()):
            source = volume.split(":")[0]
            assert (HERE / source).exists() if source.startswith(".") else source in COMPOSE["volumes"], volume


# --- Grafana's password -----------------------------------------------------------------------------------------------


def test_the_seeds_grafana_variables_reach_grafana() -> None:
    env = environment("grafana", {"KVSTREAM_GRAFANA_PASSWORD": "s3cret", "KVSTREAM_GRAFANA_ANONYMOUS": "true"})
    assert env["GF_SECURITY_ADMIN_PASSWORD"] == "s3cret" and env["GF_AUTH_ANONYMOUS_ENABLED"] == "true"
    env = environment("grafana", {})
    assert env["GF_SECURITY_ADMIN_PASSWORD"] == "" and env["GF_AUTH_ANONYMOUS_ENABLED"] == "false"


@pytest.mark.parametrize(("password", "code"), [("", 64), ("s3cret", 127)])  # 127: there is no /run.sh here
def test_grafana_does_not_start_without_a_password(password: str, code: int) -> None:
    words = [filled(word, {}) for word in SERVICES["grafana"]["entrypoint"]]
    assert words[-1].rstrip().endswith("exec /run.sh") and not Path("/run.sh").exists()
    done = subprocess.run(words, env={"GF_SECURITY_ADMIN_PASSWORD": password}, capture_output=True, text=True)
    assert done.returncode == code, done
    assert ("KVSTREAM_GRAFANA_PASSWORD is not set" in done.stderr) == (not password)


def test_grafana_does_not_say_so_for_ever() -> None:
    assert re.fullmatch(r"no|on-failure:\d", SERVICES["grafana"]["restart"])


def test_an_image_that_is_built_is_asked_of_no_registry() -> None:
    """`up` builds it, from cache if nothing is new: so after an upgrade nobody runs the old one."""
    assert {name: service.get("pull_policy") for name, service in SERVICES.items() if "build" in service} == {
        "kvstream": "build"}
