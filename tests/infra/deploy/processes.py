"""The processes that the files of `infra/` start, read from each platform's own format."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from tests.infra.deploy.code import parsed
from tests.infra.deploy.kustomize import render
from tests.infra.deploy.templates import chosen, document, template, words

#: A health check's address, in a command line.
_PROBE = re.compile(r"http://127\.0\.0\.1:\d+/\w+")


@dataclass(frozen=True, slots=True)
class Process:
    """A process of Penstock, as one file deploys it."""

    platform: str
    name: str
    argv: list[str]
    """Its command line without `penstock`."""
    users: set[str] = field(default_factory=set)
    """Users and groups, by number."""
    folders: set[str] = field(default_factory=set)
    """Where volumes are mounted."""
    environment: dict[str, str] = field(default_factory=dict)
    """Its variables, of those whose values stand in the file."""
    ports: set[int] = field(default_factory=set)
    """Ports at which others look for it."""
    probes: set[tuple[int, str]] = field(default_factory=set)
    """Port and path of each health check."""

    @property
    def where(self) -> str:
        return f"{self.platform}, {self.name}"

    @property
    def port(self) -> int | None:
        """The port on which its command line lets it listen."""
        options = parsed(self.argv)
        return options.get("health_port") or options.get("port")


def processes(root: Path) -> list[Process]:
    """Those of all platforms. `root`: a folder with `infra` in it."""
    infra = root / "infra"
    overlays = sorted((infra / "kubernetes" / "overlays").iterdir())
    return [
        *_of_compose(infra / "compose" / "compose.yaml"),
        *(process for overlay in overlays for process in _of_kubernetes(overlay)),
        *_of_ecs(infra / "aws" / "ecs.yaml"),
        *(_of_systemd(unit) for unit in sorted((infra / "systemd").glob("*.service"))),
    ]


def _of_compose(path: Path) -> Iterator[Process]:
    text = re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", path.read_text("utf-8"))
    for name, service in document(text)["services"].items():
        if service["image"].startswith("penstock"):
            mounts = [volume.split(":")[1] for volume in service.get("volumes", ())]
            secrets = [secret["target"] for secret in service["secrets"] if isinstance(secret, dict)]
            yield Process(
                "compose",
                name,
                shlex.split(command) if isinstance(command := service["command"], str) else command,
                folders={*mounts, *service["tmpfs"], *secrets},
                environment=service["environment"],
                ports={int(port.rpartition(":")[2]) for port in service.get("ports", ())},
                probes=_probes(service.get("healthcheck", {}).get("test", ())),
            )


def _of_kubernetes(overlay: Path) -> Iterator[Process]:
    objects = render(overlay)
    maps = {one["metadata"]["name"]: one["data"] for one in objects if one["kind"] == "ConfigMap"}
    for one in objects:
        for container in _containers(one):
            spec = one["spec"]["template"]["spec"]
            named = {port["name"]: port["containerPort"] for port in container.get("ports", ())}
            checks = [container[key]["httpGet"] for key in container if key.endswith("Probe")]
            sources = [source["configMapRef"]["name"] for source in container["envFrom"] if "configMapRef" in source]
            yield Process(
                f"kubernetes/{overlay.name}",
                container["name"],
                container["args"],
                users={str(spec["securityContext"][key]) for key in _USERS if key in spec["securityContext"]},
                folders={mount["mountPath"] for mount in container["volumeMounts"]},
                environment={key: value for name in sources for key, value in maps[name].items()},
                ports=set(named.values()),
                probes={(named.get(check["port"], 0), check["path"]) for check in checks},
            )


_USERS = ("runAsUser", "runAsGroup", "fsGroup")


def _containers(one: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The containers of Penstock that this object makes."""
    template = one.get("spec", {}).get("template", {})
    for container in template.get("spec", {}).get("containers", ()):
        if container["image"].startswith("penstock"):
            yield container


def _of_ecs(path: Path) -> Iterator[Process]:
    """With workers on ECS, and without."""
    resources = template(path.read_text("utf-8"))["Resources"].values()
    for one, here in product(resources, (True, False)):
        if one["Type"] == "AWS::ECS::TaskDefinition":
            for container in chosen(one, here)["Properties"]["ContainerDefinitions"]:
                yield Process(
                    "ecs",
                    container["Name"],
                    words(container["Command"]),
                    users={container["User"]},
                    folders={mount["ContainerPath"] for mount in container["MountPoints"]},
                    ports={mapping["ContainerPort"] for mapping in container.get("PortMappings", ())},
                    probes=_probes(container.get("HealthCheck", {}).get("Command", ())),
                )


def _of_systemd(unit: Path) -> Process:
    """$NAME, which may be several words or none, is empty."""
    text = unit.read_text("utf-8")
    variables = dict(re.findall(r"(\w+)=(\S+)", " ".join(re.findall("^Environment=(.*)$", text, re.MULTILINE))))
    (command,) = re.findall("^ExecStart=(.*)$", text, re.MULTILINE)
    command = re.sub(r"\$\{(\w+)\}", lambda match: variables[match[1]], command)
    _, *argv = shlex.split(re.sub(r"\$\w+", "", command))
    return Process("systemd", unit.name.removesuffix(".service"), argv, environment=variables)


def _probes(command: list[str]) -> set[tuple[int, str]]:
    addresses = map(urlsplit, _PROBE.findall(" ".join(command)))
    return {(int(address.port or 80), address.path) for address in addresses}
