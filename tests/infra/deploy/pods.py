"""Checks of Kubernetes objects beyond their schemas: each check returns what is wrong, in words."""

from __future__ import annotations

import json
import re
import tomllib
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
from tests.infra.deploy.crds import SCHEMAS
from workers.autoscaler.pools import PoolSettings, parse

Object = dict[str, Any]
#: The least release of Kubernetes that we say will do (the chart's `kubeVersion`), and the newest.
LEAST, NEWEST = "1.30", "1.37"
#: What has pods.
OWNERS = ("Deployment", "StatefulSet", "Job", "CronJob")
#: ConfigMaps and Secrets that `penstock secrets make` makes, or that an operator does.
OTHERS = {"penstock-ca", "penstock-valkey", "penstock-backup-key"}
#: Role -> its Secret, which `penstock secrets make` makes (docs/run/deploy.md), and what each has.
SECRETS, OF_SECRET = {role: f"penstock-{role}" for role in ROLES}, {"BROKER_URL", "STORE_URL"}


def complaints(objects: list[Object]) -> list[str]:
    """All that is wrong with the objects of one overlay."""
    names = {(one["kind"], one["metadata"]["name"]) for one in objects}
    found = [] if len(names) == len(objects) else ["two objects have one name"]
    for one in objects:
        where = f"{one['kind']} {one['metadata']['name']}"
        wrong = [*_shape(one), *_references(one, objects, names)]
        if one["kind"] in OWNERS:
            wrong += [*_pod(one), *_volumes(one, objects), *_container(one, objects)]
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
        if one["kind"] in SCHEMAS:
            jsonschema.validate(one, SCHEMAS[one["kind"]])
        else:
            for version in (LEAST, NEWEST):
                kubernetes_validate.validate(one, version, strict=True)
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
    if one["kind"] in ("Ingress", "HTTPRoute", "ServiceMonitor", "PodMonitor"):
        yield from _backends(one, objects)


def _backends(one: Object, objects: list[Object]) -> Iterator[str]:
    """The services, pods and ports that callers are sent to, or that are scraped."""
    spec = one["spec"]
    services = {each["metadata"]["name"]: each for each in objects if each["kind"] == "Service"}
    ports = {
        (name, port[key])
        for name, each in services.items()
        for port in each["spec"]["ports"]
        for key in ("name", "port")
    }
    if one["kind"] == "Ingress":
        backends = [path["backend"]["service"] for rule in spec["rules"] for path in rule["http"]["paths"]]
        named = [(each["name"], each["port"].get("name", each["port"].get("number"))) for each in backends]
        if {host for each in spec.get("tls", ()) for host in each["hosts"]} != {rule["host"] for rule in spec["rules"]}:
            yield "a host has no TLS"
    elif one["kind"] == "HTTPRoute":
        named = [(each["name"], each["port"]) for rule in spec["rules"] for each in rule["backendRefs"]]
        listeners = {
            (each["metadata"]["name"], listener["name"])
            for each in objects
            if each["kind"] == "Gateway"
            for listener in each["spec"]["listeners"]
        }
        # One of another namespace is not ours to know.
        ours = {(each["name"], each.get("sectionName")) for each in spec["parentRefs"] if "namespace" not in each}
        yield from (f"there is no listener {name}" for name in sorted(ours - listeners))
    elif one["kind"] == "ServiceMonitor":
        labels = spec["selector"]["matchLabels"]
        chosen = [name for name, each in services.items() if labels.items() <= each["metadata"]["labels"].items()]
        named = [(name, each["port"]) for name in chosen or ["nobody"] for each in spec["endpoints"]]
        values = {services[name]["metadata"]["labels"].get(spec["jobLabel"]) for name in chosen}
        yield from _job(values)
    else:
        pods = [each["spec"]["template"] for each in _chosen(spec["selector"]["matchLabels"], objects)]
        ports = {("", port["name"]) for pod in pods for port in pod["spec"]["containers"][0]["ports"]}
        named = [("", each["port"]) for each in spec["podMetricsEndpoints"]]
        yield from _job({pod["metadata"]["labels"].get(spec["jobLabel"]) for pod in pods})
    yield from (f"there is no port {port} of {name}" for name, port in named if (name, port) not in ports)


def _job(names: set[str | None]) -> Iterator[str]:
    """The alerts find the gateways by this job."""
    if names != {"penstock"}:
        yield f"its job's name is {names}, and the alerts look for penstock"


def _chosen(labels: dict[str, str], objects: list[Object]) -> Iterator[Object]:
    """What has pods with these labels, and keeps them running."""
    for one in objects:
        if one["kind"] in ("Deployment", "StatefulSet"):
            its = one["spec"]["template"]["metadata"]["labels"]
            if labels.items() <= its.items():
                yield one


def template(owner: Object) -> Object:
    """The pods that an object makes."""
    spec = owner["spec"]
    found: Object = (spec["jobTemplate"]["spec"] if owner["kind"] == "CronJob" else spec)["template"]
    return found


def _pod(owner: Object) -> Iterator[str]:
    """The `restricted` pod security standard, a read-only root, and no token that nobody needs."""
    spec = template(owner)["spec"]
    (container,) = spec["containers"]
    pod, own = spec["securityContext"], container["securityContext"]
    wanted = {
        "runAsNonRoot": pod.get("runAsNonRoot") is True and pod.get("runAsUser", 0) > 0,
        "seccompProfile": pod.get("seccompProfile") == {"type": "RuntimeDefault"},
        "allowPrivilegeEscalation": own.get("allowPrivilegeEscalation") is False,
        "readOnlyRootFilesystem": own.get("readOnlyRootFilesystem") is True,
        "capabilities": own.get("capabilities") == {"drop": ["ALL"]},
        "resources": {"requests", "limits"} <= container.get("resources", {}).keys(),
        "topologySpreadConstraints": owner["kind"] != "Deployment" or bool(spec.get("topologySpreadConstraints")),
        "automountServiceAccountToken": "automountServiceAccountToken" in spec,
        "a folder at /tmp": any(one["mountPath"] == "/tmp" for one in container["volumeMounts"]),
    }
    yield from (f"{name} is not as it must be" for name, well in wanted.items() if not well)


def _volumes(owner: Object, objects: list[Object]) -> Iterator[str]:
    spec = template(owner)["spec"]
    claims = [one["metadata"] for one in owner["spec"].get("volumeClaimTemplates", ())]
    named = {one["name"] for one in (*spec["volumes"], *claims)}
    if {one["name"] for one in spec["containers"][0]["volumeMounts"]} != named:
        yield "volumes and mounts differ"
    names = {(one["kind"], one["metadata"]["name"]) for one in objects}
    for one in spec["volumes"]:
        # Whoever reads a key warns of one that others may read.
        secret = any("secret" in part for part in (one, *one.get("projected", {}).get("sources", ())))
        mode = one.get("projected", one.get("secret", {})).get("defaultMode", 0o644)
        if secret and (mode & 0o007 or "fsGroup" not in spec["securityContext"]):
            yield f"the Secret in {one['name']} is readable by others, or not by its own group"
    parts = [part for one in spec["volumes"] for part in one.get("projected", {}).get("sources", ())]
    for one in (*spec["volumes"], *parts):
        for field, kind, key in (
            ("configMap", "ConfigMap", "name"),
            ("secret", "Secret", "secretName"),
            ("persistentVolumeClaim", "PersistentVolumeClaim", "claimName"),
        ):
            if field not in one:
                continue
            name = one[field].get(key) or one[field]["name"]
            if (kind, name) not in names and name not in OTHERS:
                yield f"there is no {kind} {name}"


def _container(owner: Object, objects: list[Object]) -> Iterator[str]:
    pod = template(owner)
    selector = owner["spec"].get("selector", {}).get("matchLabels", {})
    if not selector.items() <= pod["metadata"]["labels"].items():
        yield "its selector does not choose its own pods"
    names = {(one["kind"], one["metadata"]["name"]) for one in objects}
    spec = pod["spec"]
    if ("ServiceAccount", spec["serviceAccountName"]) not in names:
        yield f"there is no ServiceAccount {spec['serviceAccountName']}"
    (container,) = spec["containers"]
    if "command" not in container:  # the image's own, which is penstock
        yield from _environment(container, objects)
        yield from _command(container, spec)
        yield from _files(container, objects)
    ports = {one["name"]: one["containerPort"] for one in container.get("ports", ())}
    probes = [container[name] for name in ("startupProbe", "livenessProbe", "readinessProbe") if name in container]
    asked = [one["httpGet"]["port"] for one in probes if "httpGet" in one]
    yield from (f"there is no port {port}" for port in asked if port not in ports)
    if owner["kind"] in ("Deployment", "StatefulSet") and not {"livenessProbe", "readinessProbe"} <= container.keys():
        yield "nobody sees whether it works"


def _environment(container: Object, objects: list[Object]) -> Iterator[str]:
    words = " ".join(map(str, container["args"]))
    given = {one["name"] for one in container.get("env", ()) if f"$({one['name']})" not in words}
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


def _argv(container: Object) -> list[str]:
    """The arguments, with a word for each variable that Kubernetes puts into them."""
    names = "|".join(one["name"] for one in container.get("env", ()))
    return [re.sub(rf"\$\(({names})\)", "variable", str(word)) for word in container["args"]]


def _command(container: Object, spec: Object) -> Iterator[str]:
    argv = _argv(container)
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


def _files(container: Object, objects: list[Object]) -> Iterator[str]:
    """Gateways, sweepers and workers read what each other wrote: the ConfigMap says where, by default in a volume."""
    try:
        asks = "files_dir" in parsed(_argv(container))
    except ValueError:
        return
    maps = {one["configMapRef"]["name"] for one in container["envFrom"] if "configMapRef" in one}
    read = [one["data"] for one in objects if one["kind"] == "ConfigMap" and one["metadata"]["name"] in maps]
    folders = [data["FILES_DIR"] for data in read if "FILES_DIR" in data]
    if asks and not folders:
        yield "it is not told the others' FILES_DIR"
    for folder in folders if asks else ():
        mounted = {"name": "files", "mountPath": folder} in container["volumeMounts"]
        if mounted == folder.startswith("s3://"):
            yield "the others' files are not mounted" if not mounted else "a bucket needs no volume"


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
    pools = scaled_pools(objects)
    if not pools:
        yield "no autoscaler exports its number"
        return
    named = [pool for pool in pools if f'pool="{pool.name}"' in query]
    if not named:
        yield f"the autoscaler's pools are {', '.join(pool.name for pool in pools)}"
    yield from (
        f"the autoscaler may want {pool.rules.max}" for pool in named if spec["maxReplicaCount"] < pool.rules.max
    )


def scaled_pools(objects: list[Object]) -> list[PoolSettings]:
    """The pools of the file that the autoscaler reads."""
    texts = [one["data"]["scaling.toml"] for one in objects if "scaling.toml" in one.get("data", ())]
    return [parse(table) for text in texts for table in tomllib.loads(text)["pool"]]
