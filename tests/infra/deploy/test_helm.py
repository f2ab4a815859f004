"""The chart `infra/helm/penstock`: linted, rendered, and held against schemas, the code, and the overlays.

There are two ways to install, and one truth: with the values of `ci/NAME-values.yaml` the chart renders the objects of
the overlay NAME.
"""

from __future__ import annotations

import copy
import json
import re
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from tests.infra.deploy import pods
from tests.infra.deploy.code import parsed
from tests.infra.deploy.kustomize import render
from tests.infra.deploy.pods import complaints, scaled_pools, template
from tests.infra.deploy.programs import program
from tests.infra.deploy.templates import document, documents
from tests.infra.deploy.test_kubernetes import NAMES, OVERLAYS, container, of
from tests.processes import ROOT

CHART = ROOT / "infra" / "helm" / "penstock"
VALUES = document((CHART / "values.yaml").read_text("utf-8"))
SCHEMA = json.loads((CHART / "values.schema.json").read_text("utf-8"))
ABOUT = document((CHART / "Chart.yaml").read_text("utf-8"))
#: Labels and annotations that Helm's objects have, and an overlay's have not.
HELMS = {"app.kubernetes.io/instance", "app.kubernetes.io/managed-by", "app.kubernetes.io/version", "helm.sh/chart"}
PART_OF = "app.kubernetes.io/part-of"

#: A name that kustomize has given a hash; its letters make no word.
HASHED = re.compile(r'"(penstock|scaling|sources)-[2456789bcdfghkmt]{10}"')

needs_helm = pytest.mark.skipif(program("helm") is None, reason="no Helm on this machine")


def helm(*words: str, values: dict[str, Any] | None = None) -> subprocess.CompletedProcess[str]:
    path = program("helm")
    assert path is not None
    more = () if values is None else ("--values", "-")
    return subprocess.run(
        [path, *words, *more], input=json.dumps(values), capture_output=True, text=True, cwd=CHART.parent
    )


def chart(values: dict[str, Any] | None = None, *words: str) -> list[dict[str, Any]]:
    """What an installation with these values makes."""
    ran = helm("template", "penstock", str(CHART), "--namespace", "penstock", *words, values=values or {})
    assert ran.returncode == 0, ran.stderr
    return [one for one in documents(ran.stdout) if one]


def refused(values: dict[str, Any]) -> str:
    ran = helm("template", "penstock", str(CHART), values=values)
    assert ran.returncode != 0, "it was taken"
    return ran.stderr


@cache
def rendered(name: str) -> list[dict[str, Any]]:
    return chart(document((CHART / "ci" / f"{name}-values.yaml").read_text("utf-8")))


def comparable(objects: list[dict[str, Any]]) -> dict[tuple[str, str], Any]:
    """Objects by kind and name, without what each way adds of its own: hashes of settings, Helm's labels and hooks."""
    found = {}
    for one in copy.deepcopy(objects):
        if one["kind"] == "Namespace":  # `helm install --create-namespace`
            continue
        metadata = one["metadata"]
        labels = metadata.get("labels", {})
        # Helm's objects all say what they are part of.
        metadata["labels"] = {key: value for key, value in labels.items() if key not in HELMS | {PART_OF}}
        metadata.pop("annotations", None)
        if one["kind"] in pods.OWNERS:
            template(one)["metadata"].pop("annotations", None)
        plain = json.loads(HASHED.sub(r'"\1"', json.dumps(one)))
        found[plain["kind"], plain["metadata"]["name"]] = plain
    return found


@needs_helm
@pytest.mark.parametrize("name", NAMES)
def test_the_chart_renders_the_overlays_objects(name: str) -> None:
    ours, theirs = comparable(rendered(name)), comparable(render(OVERLAYS / name))
    assert sorted(ours) == sorted(theirs)
    for which, one in theirs.items():
        assert ours[which] == one, which


@needs_helm
@pytest.mark.parametrize("name", NAMES)
def test_what_it_renders_is_right(name: str) -> None:
    assert complaints(rendered(name)) == []


def test_each_overlay_has_values_that_equal_it() -> None:
    assert sorted(path.name for path in (CHART / "ci").iterdir()) == [f"{name}-values.yaml" for name in NAMES]


@needs_helm
def test_the_linter_finds_nothing() -> None:
    for name in ("whole", "gateway-api"):
        ran = helm("lint", "--strict", str(CHART), "--values", str(CHART / "ci" / f"{name}-values.yaml"))
        assert ran.returncode == 0, ran.stdout + ran.stderr


# ---- values ----------------------------------------------------------------------------------------------------------


def keys_of(values: Any, path: tuple[str, ...] = ()) -> set[tuple[str, ...]]:
    """Each path of the values. Kubernetes' own (resources) and names of users' own are not gone into."""
    if not isinstance(values, dict) or path[-1:] == ("resources",):
        return set()
    return {place for key, value in values.items() for place in ((*path, key), *keys_of(value, (*path, key)))}


def in_schema(schema: dict[str, Any], path: tuple[str, ...] = ()) -> set[tuple[str, ...]]:
    named = {(*path, key): value for key, value in schema.get("properties", {}).items()}
    return named.keys() | {place for key, value in named.items() for place in in_schema(value, key)}


def test_the_schema_has_each_value_and_no_other() -> None:
    jsonschema.Draft7Validator.check_schema(SCHEMA)
    jsonschema.validate(VALUES, SCHEMA)
    examples = {path for path in keys_of(VALUES) if path[0] == "models" and len(path) > 1}
    images = {(name, key) for name in ("image", "gpuImage") for key in ("repository", "tag")}
    accounts = {path for path in in_schema(SCHEMA) if path[0] == "serviceAccountAnnotations" and len(path) > 1}
    assert keys_of(VALUES) - examples - images == in_schema(SCHEMA) - accounts - {("global",)}
    # A model may say whatever `workers` says, and its own model.
    assert SCHEMA["properties"]["models"]["additionalProperties"]["properties"].keys() == {*VALUES["workers"], "model"}


def test_each_value_is_described() -> None:
    lines = (CHART / "values.yaml").read_text("utf-8").splitlines()
    keys = [number for number, line in enumerate(lines) if re.match(r" {0,2}\w+:", line)]
    assert [lines[number] for number in keys if not lines[number - 1].lstrip().startswith("#")] == []
    assert len(keys) >= len([path for path in keys_of(VALUES) if len(path) < 3])


@needs_helm
def test_a_misspelt_value_is_refused_and_so_is_one_that_would_be_unsafe() -> None:
    assert "gatway" in refused({"gatway": {}})
    assert "replica" in refused({"sweeper": {"replica": 3}})
    assert "mode" in refused({"scaling": {"mode": "keda"}})
    outside = {"ingress": {"enabled": True, "host": "a.example.org", "tlsSecret": "tls"}}
    assert "gateway.proxyHeaders must name" in refused(outside)
    proxy = {"gateway": {"proxyHeaders": ["10.1.0.0/16"]}}
    assert "without TLS" in refused({**proxy, "ingress": {"enabled": True, "host": "a.example.org"}})
    assert "either a className" in refused({**proxy, "gatewayApi": {"enabled": True, "host": "a.example.org"}})
    assert "choose one" in refused({"monitoring": {"serviceMonitor": True, "podMonitor": True}})
    assert "sqsAccount" in refused({"scaling": {"mode": "keda-sqs"}})


@needs_helm
def test_an_older_kubernetes_is_refused() -> None:
    least = ABOUT["kubeVersion"].removeprefix(">=").removesuffix(".0-0")
    assert least == pods.LEAST
    major, minor = map(int, least.split("."))
    old = helm("template", "penstock", str(CHART), "--kube-version", f"{major}.{minor - 1}.9", values={})
    assert "incompatible with Kubernetes" in old.stderr
    assert chart({}, "--kube-version", f"{major}.{minor}.0-eks-1")
    page = (ROOT / "docs" / "run" / "kubernetes.md").read_text("utf-8")
    assert f"Kubernetes {least} " in page


# ---- what values change ----------------------------------------------------------------------------------------------


@needs_helm
def test_pods_roll_with_their_settings_and_with_nothing_else() -> None:
    def annotations(objects: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            one["metadata"]["name"]: template(one)["metadata"].get("annotations", {})
            for one in objects
            if one["kind"] in pods.OWNERS
        }

    before = annotations(chart())
    files = annotations(chart({"files": {"dir": "/elsewhere"}}))
    assert {name for name in before if files[name] != before[name]} == {"gateway", "sweeper", "worker-tiny"}
    scaled = annotations(chart({"scaling": {"coolDown": 60}}))
    assert {name for name in before if scaled[name] != before[name]} == {"autoscaler"}
    assert annotations(chart({"monitoring": {"rules": True}})) == before


@needs_helm
def test_a_bucket_needs_no_volume() -> None:
    objects = chart({"files": {"dir": "s3://bucket/prefix"}})
    assert complaints(objects) == []
    assert not [one for one in objects if one["kind"] == "PersistentVolumeClaim"]


@needs_helm
def test_backups_and_the_journal_go_to_one_place_each_backup_to_its_own() -> None:
    for values in (
        {"enabled": True, "place": "/backups", "claim": "backups"},
        {"enabled": True, "place": "s3://bucket/prefix", "schedule": "0 */6 * * *"},
    ):
        objects = chart({"backup": values})
        wrong = [text for text in complaints(objects) if "PersistentVolumeClaim backups" not in text]
        assert wrong == []
        (backup,) = template(of(objects, "CronJob", "backup"))["spec"]["containers"]
        sweeper = container(objects, "sweeper")
        assert backup["args"][1] == f"{values['place']}/$(JOB)"
        assert parsed(sweeper["args"])["journal"] == f"{values['place']}/journal"
        mounted = {"name": "backups", "mountPath": "/backups"}
        assert [mounted in one["volumeMounts"] for one in (backup, sweeper)] == ["claim" in values] * 2
    assert "backup.place must name" in refused({"backup": {"enabled": True}})
    for wrong_place in ({"place": "/backups"}, {"place": "s3://bucket/prefix", "claim": "backups"}):
        assert "give backup either" in refused({"backup": {"enabled": True, **wrong_place}})


@needs_helm
def test_the_key_of_secrets_goes_to_those_who_seal_and_open_them_alone() -> None:
    objects = chart({"secrets": {"keySecret": "key"}, "sources": {"config": "[a]"}})
    assert {text.partition(": ")[2] for text in complaints(objects)} == {"there is no Secret key"}
    told = {
        one["metadata"]["name"]
        for one in objects
        if one["kind"] in pods.OWNERS
        if "PENSTOCK_SECRETS_KEY_FILE" in json.dumps(template(one))
    }
    assert told == {"gateway", "webhooks", "sources"}
    assert told == {one["metadata"]["name"] for one in objects if '{"secret": {"name": "key"}}' in json.dumps(one)}


@needs_helm
def test_each_model_has_its_workers_its_scaler_and_its_pool() -> None:
    models = {
        "tiny": None,
        "chat": {"model": "chat=hf://owner/Chat-8B", "gpu": True, "max": 3, "min": 1, "publish": False},
        "small": {"model": "small=/models/small", "extraArgs": ["--max-num-seqs", "8"]},
    }
    for mode, kind in (
        ("keda-prometheus", "ScaledObject"),
        ("hpa", "HorizontalPodAutoscaler"),
        ("actuator", None),
        ("none", None),
    ):
        objects = chart({"models": models, "scaling": {"mode": mode}})
        assert complaints(objects) == [], mode
        names = {one["metadata"]["name"] for one in objects if one["kind"] == "Deployment"}
        assert {name for name in names if name.startswith("worker-")} == {"worker-chat", "worker-small"}
        scaled = {one["metadata"]["name"] for one in objects if one["kind"] == kind} - {"gateway"}
        assert scaled == ({"worker-chat", "worker-small"} if kind else set())
        assert {one["metadata"]["name"] for one in objects if one["kind"] == "Job"} == {"publish-small"}
    settings = {"patience": 0.01, "worth": 1_000_000, "poolSettings": "headroom = 0.7"}
    objects = chart({"models": models, "scaling": {"mode": "actuator", **settings}})
    assert {(pool.rules.patience, pool.rules.worth, pool.rules.cheap_start) for pool in scaled_pools(objects)} == {
        (0.01, 1e6, 0.0)
    }
    assert [(pool.name, pool.rules.max, pool.rules.headroom, pool.actuator) for pool in scaled_pools(objects)] == [
        ("chat", 3, 0.7, "kubernetes://penstock/worker-chat"),
        ("small", 4, 0.7, "kubernetes://penstock/worker-small"),
    ]
    assert of(objects, "Role", "autoscaler")["rules"][0]["resourceNames"] == ["worker-chat", "worker-small"]
    models["next"] = {"model": "small=/models/next", "replicas": 2, "publish": False}
    rolled = chart({"models": models, "scaling": {"mode": "actuator"}})
    assert complaints(rolled) == []
    assert of(rolled, "Deployment", "worker-next")["spec"]["replicas"] == 2
    assert [pool.name for pool in scaled_pools(rolled)] == ["chat", "small"], "nothing scales what has a number"
    chat = container(objects, "worker-chat")
    assert chat["image"] == "penstock-gpu:cuda"
    assert chat["resources"]["limits"]["nvidia.com/gpu"] == "1"


@needs_helm
def test_what_a_cluster_asks_for_reaches_the_pods() -> None:
    """Placement, images, accounts: and no pod is left out."""
    objects = chart(
        {
            "image": {"repository": "registry.example.org/penstock", "tag": "cpu@sha256:" + "0" * 64},
            "imagePullPolicy": "Always",
            "imagePullSecrets": [{"name": "registry"}],
            "podAnnotations": {"example.org/team": "llm"},
            "priorityClassName": "high",
            "extraEnv": [{"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": {"name": "hub", "key": "token"}}}],
            "serviceAccountAnnotations": {"worker": {"eks.amazonaws.com/role-arn": "arn:aws:iam::1:role/w"}},
            "secrets": {"prefix": "llm-", "caConfigMap": "llm-ca"},
            "workers": {"nodeSelector": {"pool": "cpu"}, "modelsClaim": "models"},
            "valkey": {"enabled": True, "priorityClassName": "higher"},
            "monitoring": {"serviceMonitor": True, "labels": {"release": "prometheus"}},
        }
    )
    for one in objects:
        if one["kind"] in pods.OWNERS:
            pod, spec = template(one), template(one)["spec"]
            valkey = one["metadata"]["name"] == "valkey"
            assert pod["metadata"]["annotations"]["example.org/team"] == "llm"
            assert spec["imagePullSecrets"] == [{"name": "registry"}]
            assert spec["priorityClassName"] == ("higher" if valkey else "high")
            assert spec["containers"][0]["imagePullPolicy"] == "Always"
            if not valkey:
                assert spec["containers"][0]["image"].startswith("registry.example.org/penstock:cpu@sha256:")
                assert spec["containers"][0]["env"][0]["name"] == "HF_TOKEN"
                assert spec["containers"][0]["envFrom"][0]["secretRef"]["name"].startswith("llm-")
    worker = of(objects, "Deployment", "worker-tiny")["spec"]["template"]["spec"]
    assert worker["nodeSelector"] == {"pool": "cpu"}
    assert {"name": "models", "persistentVolumeClaim": {"claimName": "models"}} in worker["volumes"]
    assert of(objects, "ServiceAccount", "worker")["metadata"]["annotations"]
    assert of(objects, "ServiceMonitor", "gateway")["metadata"]["labels"]["release"] == "prometheus"
    # Names of the operator's own, which nothing here makes.
    wrong = [text.partition(": ")[2] for text in complaints(objects)]
    own = {"there is no ConfigMap llm-ca", "there is no PersistentVolumeClaim models"}
    assert {text for text in wrong if not text.startswith("its Secret llm-")} == own


@needs_helm
def test_objects_say_whose_they_are_and_selectors_do_not_change_with_a_release() -> None:
    for one in rendered("whole"):
        labels = one["metadata"]["labels"]
        assert labels.keys() >= HELMS | {PART_OF}
        assert (labels["app.kubernetes.io/managed-by"], labels[PART_OF]) == ("Helm", "penstock")
        if one["kind"] in pods.OWNERS:
            assert not template(one)["metadata"]["labels"].keys() & HELMS


@needs_helm
def test_the_notes_name_the_next_steps() -> None:
    ran = helm("install", "penstock", str(CHART), "--dry-run=client", "--namespace", "llm", values={})
    assert ran.returncode == 0, ran.stderr
    told = ran.stdout.partition("NOTES:")[2]
    assert "kubectl --namespace=llm exec deployment/gateway -- penstock keys create --tenant acme" in told
    assert "kubectl apply -k secrets" in told


def test_the_version_is_the_packages() -> None:
    version = re.findall(r'^version = "(.*)"$', (ROOT / "pyproject.toml").read_text("utf-8"), re.MULTILINE)
    assert [ABOUT["appVersion"]] == [ABOUT["version"]] == version
    assert (CHART / "files" / "alerts.yml").resolve() == Path(ROOT / "infra" / "prometheus" / "alerts.yml").resolve()
