"""Checks of Kubernetes objects beyond their schemas: each check returns what is wrong, in words."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate

from producers.admin.deployment import CA
from producers.admin.roles import ROLES
from producers.contract import keys
from tests.infra.deploy.code import grace, parsed, variables, wrong_in
from tests.infra.deploy.keda import SCHEMAS

Object = dict[str, Any]
VERSION = "1.37"
#: Role -> its Secret, which `penstock secrets make` makes (docs/deploy.md), and what each has.
SECRETS, OF_SECRET = {role: f"penstock-{role}" for role in ROLES}, {"BROKER_URL", "STORE_URL"}


def complaints(objects: list[Object]) -> list[str]:
    """All that is wrong with the objects of one overlay."""
    names = {(one["kind"], one["metadata"]["name"]) for one in objects}
    found = [] if len(names) == len(objects) else ["two objects have one name"]
    for one in objects:
        where = f"{one['kind']} {one['metadata']['name']}"
        wrong = [*_shape(one), *_references(one, objects, names)]
        if one["kind"] in ("Deployment", "Job"):
            wrong += [*_pod(one), *_container(one, objects)]
        if one["kind"] == "NetworkPolicy":
            wrong += [
                f"it lets out to anybody on {rule['ports']}"
                for rule in one["spec"].get("egress", ())
                if not rule.get("to")
            ]
        if one["kind"] == "ScaledObject":
            wrong += _triggers(one["spec"], objects)
        found += [f"{where}: {text}" for text in wrong]
    return found


def _shape(one: Object) -> Iterator[str]:
    """By its schema; strict: what the schema does not know is wrong."""
    if told := _by_schema(json.dumps(one)):
        yield told
    if one["kind"] != "Namespace" and one["metadata"].get("namespace") != "penstock":
        yield "it is in no namespace of ours"


@cache
def _by_schema(text: str) -> str:
    """Overlays have most of their objects in common."""
    one = json.loads(text)
    try:
        if one["apiVersion"].startswith("keda.sh/"):
            jsonschema.validate(one, SCHEMAS[one["kind"]])
        else:
            kubernetes_validate.validate(one, VERSION, strict=True)
    except (kubernetes_validate.ValidationError, jsonschema.ValidationError) as error:
        return str(error.message)
    return ""


def _references(one: Object, objects: list[Object], names: set[tuple[str, str]]) -> Iterator[str]:
    spec = one.get("spec", {})
    if (target := spec.get("scaleTargetRef")) and ("Deployment", target["name"]) not in names:
        yield f"there is no Deployment {target['name']}"
    for subject in one.get("subjects", ()):
        if (subject["kind"], subject["name"]) not in names:
            yield f"there is no {subject['kind']} {subject['name']}"
    selector = {"Service": spec.get("selector"), "PodDisruptionBudget": spec.get("selector", {}).get("matchLabels")}
    if one["kind"] in selector and not list(_chosen(selector[one["kind"]], objects)):
        yield f"{selector[one['kind']]} chooses no pods"
    if one["kind"] == "NetworkPolicy" and not list(_chosen(spec["podSelector"].get("matchLabels", {}), objects)):
        yield "it chooses no pods"


def _chosen(labels: dict[str, str], objects: list[Object]) -> Iterator[Object]:
    """The Deployments whose pods have these labels."""
    for one in objects:
        if one["kind"] == "Deployment":
            its = one["spec"]["template"]["metadata"]["labels"]
            if labels.items() <= its.items():
                yield one


def _pod(owner: Object) -> Iterator[str]:
    """The `restricted` pod security standard, a read-only root, and no token that nobody needs."""
    spec = owner["spec"]["template"]["spec"]
    (container,) = spec["containers"]
    pod, own = spec["securityContext"], container["securityContext"]
    wanted = {
        "runAsNonRoot": pod.get("runAsNonRoot") is True and pod.get("runAsUser", 0) >= 1000,
        "seccompProfile": pod.get("seccompProfile") == {"type": "RuntimeDefault"},
        "allowPrivilegeEscalation": own.get("allowPrivilegeEscalation") is False,
        "readOnlyRootFilesystem": own.get("readOnlyRootFilesystem") is True,
        "capabilities": own.get("capabilities") == {"drop": ["ALL"]},
        "resources": {"requests", "limits"} <= container.get("resources", {}).keys(),
        "topologySpreadConstraints": owner["kind"] == "Job" or bool(spec.get("topologySpreadConstraints")),
        "automountServiceAccountToken": "automountServiceAccountToken" in spec,
        "a folder at /tmp": any(one["mountPath"] == "/tmp" for one in container["volumeMounts"]),
    }
    yield from (f"{name} is not as it must be" for name, well in wanted.items() if not well)
    if {one["name"] for one in container["volumeMounts"]} != {one["name"] for one in spec["volumes"]}:
        yield "volumes and mounts differ"


def _container(owner: Object, objects: list[Object]) -> Iterator[str]:
    template = owner["spec"]["template"]
    selector = owner["spec"].get("selector", {}).get("matchLabels", {})
    if not selector.items() <= template["metadata"]["labels"].items():
        yield "its selector does not choose its own pods"
    names = {(one["kind"], one["metadata"]["name"]) for one in objects}
    spec = template["spec"]
    if ("ServiceAccount", spec["serviceAccountName"]) not in names:
        yield f"there is no ServiceAccount {spec['serviceAccountName']}"
    (container,) = spec["containers"]
    yield from _environment(container, objects)
    yield from _command(container, spec)
    yield from _files(container)
    ports = {one["name"]: one["containerPort"] for one in container.get("ports", ())}
    probes = [container[name] for name in ("startupProbe", "livenessProbe", "readinessProbe") if name in container]
    yield from (f"there is no port {one['httpGet']['port']}" for one in probes if one["httpGet"]["port"] not in ports)


def _environment(container: Object, objects: list[Object]) -> Iterator[str]:
    given = {one["name"] for one in container.get("env", ())}
    for source in container.get("envFrom", ()):
        if "secretRef" in source:
            role = {"models": "operator"}.get(container["args"][0], container["args"][0])
            if source["secretRef"]["name"] != SECRETS[role]:
                yield f"its Secret {source['secretRef']['name']} is not that of {role}"
            given |= OF_SECRET
        else:
            name = source["configMapRef"]["name"]
            maps = [one for one in objects if (one["kind"], one["metadata"]["name"]) == ("ConfigMap", name)]
            if not maps:
                yield f"there is no ConfigMap {name}"
            given |= {key for one in maps for key in one["data"]}
    yield from (f"nothing reads the variable {name}" for name in sorted(given - variables()))
    if not given >= OF_SECRET:
        yield "it does not know its servers"
    if {"name": "ca", "mountPath": Path(CA).parent.as_posix(), "readOnly": True} not in container["volumeMounts"]:
        yield "it cannot check its server's certificate"


def _command(container: Object, spec: Object) -> Iterator[str]:
    argv = [str(word) for word in container["args"]]
    try:
        options = parsed(argv)
    except ValueError as error:
        yield str(error)
        return
    limit = spec.get("terminationGracePeriodSeconds", 30)
    stop = container.get("lifecycle", {}).get("preStop", {}).get("sleep", {}).get("seconds", 0)
    if limit < grace(argv) + stop:
        yield f"it is killed after {limit} s, and may need {grace(argv) + stop:g} s"
    port = options.get("health_port") or options.get("port")
    if port is not None and port not in [one["containerPort"] for one in container.get("ports", ())]:
        yield f"it listens on {port}, which is no port of the container"
    if argv[0] == "worker" and container.get("lifecycle") != {"preStop": {"exec": {"command": ["penstock", "drain"]}}}:
        yield "it does not drain in its preStop hook"


def _files(container: Object) -> Iterator[str]:
    """Gateways, sweepers and workers read what each other wrote: the ConfigMap says where, by default in a volume."""
    try:
        asks = "files_dir" in parsed([str(word) for word in container["args"]])
    except ValueError:
        return
    if asks and {"configMapRef": {"name": "penstock"}} not in container["envFrom"]:
        yield "it is not told the others' FILES_DIR"
    if asks and {"name": "files", "mountPath": "/files"} not in container["volumeMounts"]:
        yield "the others' files are not mounted"


def _triggers(spec: Object, objects: list[Object]) -> Iterator[str]:
    names = [one.get("name") for one in spec["triggers"]]
    if len(names) > 1:
        formula = spec.get("advanced", {}).get("scalingModifiers", {}).get("formula", "")
        if sorted(formula.split(" + ")) != sorted(names):
            yield f"its formula {formula!r} is not the sum of its triggers"
    for trigger in spec["triggers"]:
        about = trigger["metadata"]
        if "query" in about:
            yield from wrong_in(about["query"])
            yield from _as_the_autoscaler(spec, about["query"], objects)
        if "queueURL" in about and about["queueURL"].rpartition("-")[2] not in keys.TIERS:
            yield f"{about['queueURL']} is the queue of no tier"
        wanted = trigger.get("authenticationRef", {}).get("name")
        if wanted and ("TriggerAuthentication", wanted) not in {(o["kind"], o["metadata"]["name"]) for o in objects}:
            yield f"there is no TriggerAuthentication {wanted}"


def _as_the_autoscaler(spec: Object, query: str, objects: list[Object]) -> Iterator[str]:
    """Pool and largest number are those of the autoscaler in the same overlay."""
    scalers = [one for one in objects if (one["kind"], one["metadata"]["name"]) == ("Deployment", "autoscaler")]
    if not scalers:
        yield "no autoscaler exports its number"
    for one in scalers:
        options = parsed(one["spec"]["template"]["spec"]["containers"][0]["args"])
        if f'pool="{options["model"]}"' not in query:
            yield f"the autoscaler's pool is {options['model']}"
        if spec["maxReplicaCount"] < options["max_workers"]:
            yield f"the autoscaler may want {options['max_workers']}"
