"""`infra/compose/compose.yaml`: by compose's own schema, and against the code."""

from __future__ import annotations

import copy
import json
import re
import shlex
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from producers.admin.deployment import CA, make
from tests.infra.deploy.code import grace, parsed, variables
from tests.infra.deploy.templates import document
from tests.processes import ROOT

FOLDER = ROOT / "infra" / "compose"
_SCHEMA = json.loads(files("check_jsonschema.builtin_schemas.vendor").joinpath("compose-spec.json").read_text("utf-8"))
SCHEMA = jsonschema.Draft202012Validator(_SCHEMA)
WANTED = {
    "valkey",
    "publish",
    "operator",
    "gateway",
    "workers",
    "sweeper",
    "webhooks",
    "sources",
    "prometheus",
    "grafana",
}


@cache
def said() -> dict[str, Any]:
    """Compose's file without a setting of its user's."""
    return filled_in({})


def filled_in(settings: Mapping[str, str]) -> dict[str, Any]:
    """Compose merges `<<`, fills in ${NAME:-value}, and splits a command that is one text, as is done here."""
    text = (FOLDER / "compose.yaml").read_text("utf-8")
    text = re.sub(r"\$\{(\w+):-([^}]*)\}", lambda match: settings.get(match[1]) or match[2], text)
    compose: dict[str, Any] = document(text)
    for service in compose["services"].values():
        if isinstance(service.get("command"), str):
            service["command"] = shlex.split(service["command"])
    return compose


def complaints(compose: dict[str, Any]) -> list[str]:
    if wrong := [error.message for error in SCHEMA.iter_errors(compose)]:
        return wrong
    found = [f"{name} is not there" for name in sorted(WANTED - compose["services"].keys())]
    for name, service in compose["services"].items():
        found += [f"{name}: {text}" for text in _service(service, compose)]
    return found


def _service(service: dict[str, Any], compose: dict[str, Any]) -> Iterator[str]:
    wanted = {
        "read_only": service.get("read_only") is True,
        "cap_drop": service.get("cap_drop") == ["ALL"],
        "security_opt": "no-new-privileges:true" in service.get("security_opt", ()),
        "mem_limit": "mem_limit" in service,
        "a tag of its image": re.search(r":[\w.-]+$", service["image"]) and ":latest" not in service["image"],
    }
    yield from (f"{name} is not as it must be" for name, well in wanted.items() if not well)
    environment = service.get("environment", {})
    yield from (f"nothing reads the variable {one}" for one in sorted(environment.keys() - variables()))
    yield from (f"{one} looks like a secret" for one in environment if re.search("(PASSWORD|TOKEN|SECRET)$", one))
    yield from (f"port {port} is published to others" for port in service.get("ports", ()) if port[:10] != "127.0.0.1:")
    for volume in service.get("volumes", ()):
        source = volume.partition(":")[0]
        if "/" not in source and source not in compose["volumes"]:
            yield f"there is no volume {source}"
        elif source.startswith("../") and not (FOLDER / source).is_dir():
            yield f"there is no folder {source}"
    if service["image"].startswith("penstock:"):
        yield from _penstock(service)


def _penstock(service: dict[str, Any]) -> Iterator[str]:
    """The autoscaler runs its workers itself, as `workers`; what is run once is the operator's."""
    word = service["command"][0]
    role = {"autoscaler": "workers", "models": "operator", "tenants": "operator"}.get(word, word)
    if f"./secrets/{role}.env" not in service["env_file"]:
        yield f"it does not log in as {role}"
    if {"source": "ca", "target": CA} not in service["secrets"]:
        yield "it cannot check its server's certificate"
    try:
        options = parsed(service["command"])
    except ValueError as error:
        yield str(error)
        return
    if float(service["stop_grace_period"].removesuffix("s")) < grace(service["command"]):
        yield f"it is killed after {service['stop_grace_period']}, and may need {grace(service['command']):g} s"
    ports = [one.rpartition(":")[2] for one in service.get("ports", ())]
    if ports and ports != [str(options["port"])]:
        yield f"it listens on {options['port']}, not on {ports}"
    if not (FOLDER / service["build"]["context"] / service["build"]["dockerfile"]).is_file():
        yield "there is no file to build its image by"


def test_it_is_right() -> None:
    assert complaints(said()) == []


def test_valkey_refuses_what_is_new_before_the_kernel_kills_it() -> None:
    valkey = said()["services"]["valkey"]
    program, *words = valkey["command"]
    options = dict(zip(words[::2], words[1::2], strict=True))
    assert (program, options["--save"], options["--maxmemory-policy"]) == ("valkey-server", "", "noeviction")
    # A rewrite of the file copies what changes meanwhile; scripts that end work write beyond the bound.
    assert int(options["--maxmemory"].removesuffix("mb")) <= 0.6 * 1024 * int(valkey["mem_limit"].removesuffix("g"))


def test_valkey_takes_tls_alone_and_no_user_without_a_password(tmp_path: Path) -> None:
    """By the files that `penstock secrets make` makes, each of which is there."""
    compose = said()
    make(tmp_path, ["valkey"])
    mounted = {name: one["file"] for name, one in compose["secrets"].items()}
    assert all(
        file.startswith("./secrets/") and (tmp_path / file[len("./secrets/") :]).is_file() for file in mounted.values()
    )
    valkey = compose["services"]["valkey"]
    words = valkey["command"][1:]
    options = dict(zip(words[::2], words[1::2], strict=True))
    assert (options["--port"], options["--tls-port"]) == ("0", "6379")
    places = {f"/run/secrets/{one}" if isinstance(one, str) else one["target"] for one in valkey["secrets"]}
    assert places == {value for name, value in options.items() if name.endswith("file")}
    assert "ports" not in valkey
    assert compose["services"]["grafana"]["environment"]["GF_AUTH_ANONYMOUS_ENABLED"] == "false"


def test_every_setting_that_it_takes_is_in_the_example() -> None:
    text = (FOLDER / "compose.yaml").read_text("utf-8")
    example = (FOLDER / "example.env").read_text("utf-8")
    names = set(re.findall(r"^#?([A-Z_]+)=", example, re.MULTILINE))
    filled_in = set(re.findall(r"\$\{(\w+):-", text))
    assert filled_in <= names
    assert names - filled_in <= variables()


def test_the_example_sets_when_a_worker_is_started() -> None:
    (line,) = re.findall(r"^#AUTOSCALER_OPTIONS=(.*)$", (FOLDER / "example.env").read_text("utf-8"), re.MULTILINE)
    compose = filled_in({"MODEL": "hf://owner/name", "AUTOSCALER_OPTIONS": line})
    assert complaints(compose) == []
    options = parsed(compose["services"]["workers"]["command"])
    assert (options["model"], options["patience"], options["worth"]) == ("hf://owner/name", 0.1, 1.0)
    unset = parsed(said()["services"]["workers"]["command"])
    assert (unset["model"], unset["patience"], unset["worth"]) == ("tiny", None, None)


Change = Callable[[dict[str, Any]], Any]
WRONG: dict[str, tuple[Change, str]] = {
    "a misspelt key": (lambda s: s["gateway"].update(comand=["gateway"]), "comand"),
    "an option that is gone": (lambda s: s["sweeper"]["command"].append("--leese=3"), "--leese"),
    "killed while it drains": (lambda s: s["gateway"].update(stop_grace_period="40s"), "may need 60 s"),
    "workers killed while they drain": (lambda s: s["workers"].update(stop_grace_period="40s"), "may need 60 s"),
    "a variable that nobody reads": (
        lambda s: s["gateway"].update(environment={"BROKER": "redis://valkey"}),
        "nothing reads the variable BROKER",
    ),
    "a password in the file": (
        lambda s: s["grafana"]["environment"].update(GF_SECURITY_ADMIN_PASSWORD="hunter2"),
        "looks like a secret",
    ),
    "a root that may be written": (lambda s: s["webhooks"].update(read_only=False), "read_only"),
    "no limit": (lambda s: s["valkey"].pop("mem_limit"), "mem_limit"),
    "another port": (lambda s: s["gateway"].update(ports=["127.0.0.1:8000:8001"]), "listens on 8000"),
    "a server for all": (lambda s: s["gateway"].update(ports=["8000:8000"]), "published to others"),
    "another's user": (
        lambda s: s["gateway"].update(env_file=["./secrets/operator.env"]),
        "does not log in as gateway",
    ),
    "no volume": (lambda s: s["gateway"].update(volumes=["uploads:/files"]), "no volume uploads"),
}


@pytest.mark.parametrize(("change", "told"), WRONG.values(), ids=WRONG)
def test_a_wrong_file_is_found(change: Change, told: str) -> None:
    compose = copy.deepcopy(said())
    change(compose["services"])
    found = complaints(compose)
    assert any(told in one for one in found), found
