"""The overlays of `infra/kubernetes`: by their schemas, among themselves, and against the code."""

from __future__ import annotations

import copy
import json
import re
import shutil
import subprocess
from collections.abc import Callable
from functools import cache
from ipaddress import ip_address, ip_network
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
from redis import Redis
from redis.exceptions import NoPermissionError

from engine.config import EngineConfig
from producers.admin.deployment import make
from producers.connection.addresses import Address, is_public
from producers.connection.connect import connect
from producers.sources.settings import read
from tests.infra.deploy import rules
from tests.infra.deploy.code import parsed, wrong_in
from tests.infra.deploy.crds import LEADER_WORKER_SET
from tests.infra.deploy.kustomize import render
from tests.infra.deploy.pods import (
    LEAST,
    OF_SECRET,
    OTHERS,
    SECRETS,
    _container,
    _pod,
    _volumes,
    complaints,
    scaled_pools,
)
from tests.infra.deploy.programs import program
from tests.infra.deploy.templates import document, documents
from tests.processes import ROOT, free_port, guarded
from tests.waiting import PATIENCE_S, until

OVERLAYS = ROOT / "infra" / "kubernetes" / "overlays"
NAMES = sorted(path.name for path in OVERLAYS.iterdir())


@cache
def rendered(name: str) -> list[dict[str, Any]]:
    return render(OVERLAYS / name)


@pytest.mark.parametrize("name", NAMES)
def test_an_overlay_is_right(name: str) -> None:
    assert complaints(rendered(name)) == []


def test_each_way_to_scale_has_an_overlay_and_no_component_is_left_over() -> None:
    assert NAMES == ["actuator", "cuda", "gateway-api", "hpa", "keda-prometheus", "keda-sqs", "whole"]
    said = [document((OVERLAYS / name / "kustomization.yaml").read_text("utf-8")) for name in NAMES]
    used = {path.rpartition("/")[2] for one in said for path in one["components"]}
    assert used == {path.name for path in (OVERLAYS.parent / "components").iterdir()}


@pytest.mark.parametrize("name", ["leaderworkerset", "leaderworkerset-cuda"])
def test_a_model_on_several_machines_is_right(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    group, settings, *policies = render(OVERLAYS.parent / name)
    jsonschema.validate(group, LEADER_WORKER_SET)
    template = group["spec"]["leaderWorkerTemplate"]
    pods = [template["leaderTemplate"], template["workerTemplate"]]
    claim = {"kind": "PersistentVolumeClaim", "metadata": {"name": "penstock-models"}}
    objects = [*rendered("whole"), claim, settings, {"kind": "Secret", "metadata": {"name": "penstock-ranks"}}]
    for pod in pods:
        whole = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "p", **pod["metadata"]}, "spec": pod["spec"]}
        kubernetes_validate.validate(whole, LEAST, strict=True)
        owner = {"kind": "LeaderWorkerSet", "metadata": group["metadata"], "spec": {"template": pod}}
        assert [*_pod(owner), *_volumes(owner, objects)] == []
    leader = {"kind": "StatefulSet", "metadata": group["metadata"], "spec": {"template": pods[0]}}
    assert [*_container(leader, objects)] == []
    lead, other = ([str(word) for word in pod["spec"]["containers"][0]["args"]] for pod in pods)
    for variable, value in {
        "LWS_LEADER_ADDRESS": "worker-large-0.worker-large.penstock",
        "LWS_WORKER_INDEX": "1",
    }.items():
        monkeypatch.setenv(variable, value)
    served, joined = parsed(lead), parsed(other)
    assert (joined["lead"], joined["node"]) == ("worker-large-0.worker-large.penstock", 1)
    assert joined["model"] == served["model"][0]
    assert Path(joined["ranks_secret"]) == Path(served["ranks_secret"])
    names = ("tensor_parallel", "pipeline_parallel", "nodes", "ranks_secret")
    config = EngineConfig(**{each: served[each] for each in names})
    assert config.nodes == template["size"]
    # Who may reach whom, and where.
    port = int(config.ranks_address.rpartition(":")[2])
    assert joined["port"] == port
    assert {"name": "ranks", "containerPort": port} in pods[0]["spec"]["containers"][0]["ports"]
    labels = [pod["metadata"]["labels"].items() for pod in pods]
    if name == "leaderworkerset-cuda":
        gpus = {pod["spec"]["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] for pod in pods}
        assert gpus == {str(config.own_ranks)}
        between = policies.pop()
        kubernetes_validate.validate(between, LEAST, strict=True)
        same = between["spec"]["podSelector"]
        assert all(same["matchLabels"].items() <= each for each in labels)
        ((incoming,), (outgoing,)) = between["spec"]["ingress"], between["spec"]["egress"]
        assert incoming["from"] == outgoing["to"] == [{"podSelector": same}]
        assert incoming["ports"] == outgoing["ports"] == [{"protocol": "TCP"}]
    for policy, own, direction, way in zip(policies, labels, ("ingress", "egress"), ("from", "to"), strict=True):
        kubernetes_validate.validate(policy, LEAST, strict=True)
        (rule,) = policy["spec"][direction]
        assert policy["spec"]["podSelector"]["matchLabels"].items() <= own
        assert rule["ports"] == [{"port": port, "protocol": "TCP"}]
        (peer,) = rule[way]
        others = labels[1] if direction == "ingress" else labels[0]
        assert peer["podSelector"]["matchLabels"].items() <= others


def test_kubectl_renders_the_same() -> None:
    """Where there is one. Everywhere, this file's other tests take our own rendering."""
    kubectl = program("kubectl")
    for name in NAMES if kubectl else ():
        ran = subprocess.run([kubectl, "kustomize", OVERLAYS / name], capture_output=True, text=True, check=True)
        ours, theirs = rendered(name), documents(ran.stdout)
        assert sorted(map(json.dumps, map(_sorted, ours))) == sorted(map(json.dumps, map(_sorted, theirs)))


def test_the_folder_of_secrets_makes_what_pods_take(tmp_path: Path) -> None:
    """By kubectl, where there is one."""
    make(tmp_path, ["valkey"])
    kubectl = program("kubectl")
    if kubectl is None:
        return
    ran = subprocess.run([kubectl, "kustomize", tmp_path], capture_output=True, text=True, check=True)
    made = {(one["kind"], one["metadata"]["name"]): one["data"] for one in documents(ran.stdout)}
    secrets = {name: data for (kind, name), data in made.items() if kind == "Secret"}
    assert {name for name in secrets if secrets[name].keys() == OF_SECRET} == set(SECRETS.values())
    assert {(kind, name) for kind, name in made if name in OTHERS - {"penstock-backup-key"}} == {
        ("ConfigMap", "penstock-ca"),
        ("Secret", "penstock-valkey"),
    }
    (valkey,) = [one for one in rendered("whole") if one["kind"] == "StatefulSet"]
    words = " ".join(valkey["spec"]["template"]["spec"]["containers"][0]["args"])
    assert set(re.findall(r"/run/valkey/(\S+)", words)) == secrets["penstock-valkey"].keys()


def _sorted(one: Any) -> Any:
    return json.loads(json.dumps(one, sort_keys=True))


def test_workers_start_from_zero_and_no_overlay_sets_their_number_twice() -> None:
    for name in NAMES:
        objects = {(one["kind"], one["metadata"]["name"]): one for one in rendered(name)}
        assert "replicas" not in objects["Deployment", "worker-tiny"]["spec"]
        scalers = [
            kind for kind, whose in objects if whose == "worker-tiny" and kind.endswith(("Autoscaler", "dObject"))
        ]
        acts = any(pool.actuator.startswith("kubernetes://") for pool in scaled_pools(rendered(name)))
        assert len(scalers) + acts == 1, name


def test_the_queues_are_those_that_the_template_makes() -> None:
    resources = json.loads((ROOT / "infra/aws/penstock.json").read_text("utf-8"))["Resources"].values()
    made = {one["Properties"]["QueueName"] for one in resources if one["Type"] == "AWS::SQS::Queue"}
    (scaled,) = [one for one in rendered("keda-sqs") if one["kind"] == "ScaledObject"]
    named = {one["metadata"]["queueURL"].rpartition("/")[2] for one in scaled["spec"]["triggers"]}
    assert len(named) == 4
    assert named <= made


def test_the_autoscaler_may_do_what_its_actuator_does_and_no_more() -> None:
    (role,) = [one for one in rendered("actuator") if one["kind"] == "Role"]
    may = {(verb, name) for rule in role["rules"] for verb in rule["verbs"] for name in rule["resources"]}
    # As the actuator names the right that a refused request lacked.
    source = (ROOT / "workers/autoscaler/actuators/kubernetes.py").read_text("utf-8")
    assert may == set(re.findall(r'"(\w+) on ([\w/]+)"', source))
    (account,) = [one for one in rendered("actuator") if one["kind"] == "RoleBinding"]
    pod = of(rendered("actuator"), "Deployment", "autoscaler")["spec"]["template"]["spec"]
    assert account["subjects"][0]["name"] == pod["serviceAccountName"]
    assert pod["automountServiceAccountToken"] is True


def test_the_sources_file_is_one_that_sources_take(tmp_path: Path) -> None:
    (text,) = [one["data"]["sources.toml"] for one in rendered("whole") if "sources.toml" in one.get("data", ())]
    (tmp_path / "sources.toml").write_text(text)
    assert list(read(tmp_path / "sources.toml")) == ["nightly"]


def test_the_adapters_rule_answers_what_the_hpa_asks_once_for_all_gateways() -> None:
    page = (ROOT / "docs/run/kubernetes.md").read_text("utf-8")
    (told,) = [one for one in re.findall(r"```yaml\n(.*?)```", page, re.DOTALL) if "externalRules" in one]
    (rule,) = document(told)["externalRules"]
    metric = of(rendered("hpa"), "HorizontalPodAutoscaler", "worker-tiny")["spec"]["metrics"][0]["external"]["metric"]
    assert rule["seriesQuery"] == metric["name"]
    matchers = ",".join(f'{name}="{value}"' for name, value in metric["selector"]["matchLabels"].items())
    query = rule["metricsQuery"].replace("<<.Series>>", metric["name"]).replace("<<.LabelMatchers>>", matchers)
    assert wrong_in(query) == []
    assert query.startswith("max by (pool) (")
    assert rule["resources"] == {"namespaced": False}, "the gateways' series have no label of a namespace"


def test_a_worker_on_a_gpu_needs_no_more_of_a_node_than_the_device_plugin() -> None:
    """The label nvidia.com/gpu.present would be of GPU Feature Discovery."""
    pod = of(rendered("cuda"), "Deployment", "worker-tiny")["spec"]["template"]["spec"]
    assert pod["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] == "1"
    assert "nodeSelector" not in pod


def test_who_uses_aws_reaches_the_agent_of_its_credentials_and_nothing_else_by_http() -> None:
    """EKS Pod Identity's is at http://169.254.170.23 on each node."""
    for name in NAMES:
        policies = [one for one in rendered(name) if one["kind"] == "NetworkPolicy"]
        by_http = [
            (rule.get("to"), one["spec"]["podSelector"]["matchExpressions"][0]["values"])
            for one in policies
            for rule in one["spec"].get("egress", ())
            if any(port["port"] == 80 for port in rule["ports"])
        ]
        users = ["gateway", "sweeper", "publish", "worker", "autoscaler", *["sources", "backup"] * (name == "whole")]
        assert by_http == [([{"ipBlock": {"cidr": "169.254.170.23/32"}}], users)]


def test_the_rules_are_those_of_prometheus_file() -> None:
    assert rules.FILE.read_text("utf-8") == rules.text(), "`python -m tests.infra.deploy.rules` writes them anew"


def test_valkey_serves_by_the_files_options_and_probes_tell_whether_it_does(tmp_path: Path) -> None:
    """A Redis with TLS stands in for it, where Debian's `redis-tools` are installed: CI does that."""
    program, client = shutil.which("redis-check-rdb"), shutil.which("redis-cli")
    if program is None or client is None:
        return
    make(tmp_path, ["127.0.0.1"])
    users = tmp_path / "users.acl"
    users.write_text(users.read_text().replace(" +client|setinfo", ""))  # which Redis 7.0 does not know
    (pod,) = of(rendered("whole"), "StatefulSet", "valkey")["spec"]["template"]["spec"]["containers"]
    mounts = {one["mountPath"] for one in pod["volumeMounts"]}
    port = free_port()

    def here(words: list[str]) -> list[str]:
        """The files of the pod's volumes are in one folder here."""
        return [str(tmp_path / Path(word).name) if str(Path(word).parent) in mounts else word for word in words]

    def asks(probe: str) -> bool:
        words = [client, "-p", str(port), *here(pod[probe]["exec"]["command"][1:])]
        return subprocess.run(words, capture_output=True).returncode == 0

    words = here([word if word != "/data" else str(tmp_path) for word in pod["args"]])
    words[words.index("--tls-port") + 1] = str(port)

    def server() -> subprocess.Popen[bytes]:
        # One program, which goes by its name.
        line = guarded("bash", "-c", 'exec -a redis-server "$0" "$@"', program, *words, "--bind", "127.0.0.1")
        return subprocess.Popen(line, cwd=tmp_path, stdout=subprocess.DEVNULL)

    assert not asks("livenessProbe"), "nobody is there"
    running = server()
    try:
        until(lambda: asks("readinessProbe"))
        assert asks("livenessProbe")
        user = (tmp_path / "gateway.env").read_text().partition("://")[2].partition("@")[0]
        with connect(f"rediss://{user}@127.0.0.1:{port}/0?ssl_ca_certs={tmp_path / 'ca.crt'}") as redis:
            redis.set("penstock:task:1", "a")
            assert redis.info("persistence")["aof_enabled"] == 1
        probe = Redis("127.0.0.1", port, username="probe", password="", ssl=True, ssl_ca_certs=str(tmp_path / "ca.crt"))
        with probe, pytest.raises(NoPermissionError):
            probe.get("penstock:task:1")
        running.terminate()
        running.wait(PATIENCE_S)
        users.write_text("".join(line for line in users.open() if not line.startswith("user probe ")))
        running = server()
        until(lambda: asks("livenessProbe"))
        assert not asks("readinessProbe"), "an error is an answer, as while it reads its file, but it does not serve"
        assert not asks("startupProbe")
    finally:
        running.kill()
        running.wait(PATIENCE_S)


# ---- the checks find what is wrong --------------------------------------------------------------------------------


def test_pods_reach_by_https_what_webhooks_may_call_and_no_other_address() -> None:
    """Python's own lists, and ours, of what is not public."""
    (rule,) = of(rendered("hpa"), "NetworkPolicy", "https")["spec"]["egress"]
    blocks = [
        (ip_network(one["ipBlock"]["cidr"]), [ip_network(text) for text in one["ipBlock"]["except"]])
        for one in rule["to"]
    ]

    def reached(address: Address) -> bool:
        return any(address in network and not any(address in but for but in excepted) for network, excepted in blocks)

    edges = {
        address + step
        for network, excepted in blocks
        for part in (network, *excepted)
        for address in (part.network_address, part.broadcast_address)
        for step in (-1, 0, 1)
        if 0 <= int(address) + step < 2**address.max_prefixlen
    }
    others = "100.64.0.1 100.127.255.254 169.254.169.254 192.0.0.192 8.8.8.8 2606:4700::1111 fd00:ec2::254 fe80::1 ::1"
    for address in {*edges, *map(ip_address, others.split())}:
        if reached(address):
            assert is_public(address), address
    assert reached(ip_address("8.8.8.8"))
    assert reached(ip_address("2606:4700::1111"))


def of(objects: list[dict[str, Any]], kind: str, name: str) -> Any:
    return next(one for one in objects if (one["kind"], one["metadata"]["name"]) == (kind, name))


def container(objects: list[dict[str, Any]], name: str) -> Any:
    return of(objects, "Deployment", name)["spec"]["template"]["spec"]["containers"][0]


def trigger(objects: list[dict[str, Any]]) -> Any:
    return of(objects, "ScaledObject", "worker-tiny")["spec"]["triggers"][0]["metadata"]


Change = Callable[[list[dict[str, Any]]], Any]
WRONG: dict[str, tuple[str, Change, str]] = {
    "a misspelt field": ("hpa", lambda o: container(o, "gateway").update(imagePulPolicy="Always"), "imagePulPolicy"),
    "a number as text": ("hpa", lambda o: of(o, "Deployment", "sweeper")["spec"].update(replicas="2"), "integer"),
    "an option that is gone": (
        "hpa",
        lambda o: container(o, "worker-tiny")["args"].append("--drain-tmeout"),
        "No such option",
    ),
    "killed while it drains": (
        "hpa",
        lambda o: container(o, "worker-tiny")["args"].extend(["--drain-timeout", "91"]),
        "may need 121 s",
    ),
    "a variable that nobody reads": (
        "hpa",
        lambda o: container(o, "gateway").update(env=[{"name": "BROKER", "value": "redis://a"}]),
        "nothing reads the variable BROKER",
    ),
    "another's user": (
        "hpa",
        lambda o: container(o, "gateway")["envFrom"][0]["secretRef"].update(name="penstock-operator"),
        "penstock-operator is not that of gateway",
    ),
    "no authority": (
        "hpa",
        lambda o: container(o, "gateway")["volumeMounts"].pop(1),
        "cannot check its server's certificate",
    ),
    "a way out to anybody": (
        "hpa",
        lambda o: of(o, "NetworkPolicy", "https")["spec"]["egress"][0].pop("to"),
        "lets out to anybody",
    ),
    "no servers": ("hpa", lambda o: container(o, "gateway").update(envFrom=[]), "does not know its servers"),
    "files of its own": ("hpa", lambda o: container(o, "worker-tiny")["envFrom"].pop(), "FILES_DIR"),
    "a sweeper that nobody probes": (
        "hpa",
        lambda o: container(o, "sweeper").pop("livenessProbe"),
        "nobody sees whether it works",
    ),
    "settings of nobody": (
        "hpa",
        lambda o: of(o, "Deployment", "autoscaler")["spec"]["template"]["spec"]["volumes"][-1]["projected"]["sources"][
            -1
        ]["configMap"].update(name="scaling"),
        "there is no ConfigMap scaling",
    ),
    "no drain before the end": ("hpa", lambda o: container(o, "worker-tiny").pop("lifecycle"), "preStop"),
    "a port that is not its own": (
        "hpa",
        lambda o: container(o, "webhooks")["args"].__setitem__(-1, "9"),
        "listens on 9",
    ),
    "may write its root": (
        "hpa",
        lambda o: container(o, "worker-tiny")["securityContext"].update(readOnlyRootFilesystem=False),
        "readOnlyRootFilesystem",
    ),
    "may be root": (
        "hpa",
        lambda o: of(o, "Deployment", "gateway")["spec"]["template"]["spec"]["securityContext"].pop("runAsNonRoot"),
        "runAsNonRoot",
    ),
    "a budget of nobody": (
        "hpa",
        lambda o: of(o, "PodDisruptionBudget", "worker-tiny")["spec"]["selector"]["matchLabels"].update(a="b"),
        "chooses no pods",
    ),
    "scales what is not there": (
        "hpa",
        lambda o: of(o, "HorizontalPodAutoscaler", "worker-tiny")["spec"]["scaleTargetRef"].update(name="worker"),
        "no Deployment worker",
    ),
    "an Ingress without TLS": ("whole", lambda o: of(o, "Ingress", "gateway")["spec"].pop("tls"), "has no TLS"),
    "a route to nobody": (
        "gateway-api",
        lambda o: of(o, "HTTPRoute", "gateway")["spec"]["rules"][0]["backendRefs"][0].update(port=8000),
        "there is no port 8000 of gateway",
    ),
    "a listener that is not there": (
        "gateway-api",
        lambda o: of(o, "HTTPRoute", "gateway")["spec"]["parentRefs"][0].update(sectionName="http"),
        "there is no listener",
    ),
    "a listener without TLS": (
        "gateway-api",
        lambda o: of(o, "Gateway", "penstock")["spec"]["listeners"][0].pop("tls"),
        "'tls' is a required property",
    ),
    "a misspelt field of a monitor": (
        "whole",
        lambda o: of(o, "ServiceMonitor", "gateway")["spec"]["endpoints"][0].update(intervall="5s"),
        "intervall",
    ),
    "a port that nobody scrapes": (
        "gateway-api",
        lambda o: of(o, "PodMonitor", "gateway")["spec"]["podMetricsEndpoints"][0].update(port="metrics"),
        "there is no port metrics",
    ),
    "a job that no alert looks for": (
        "whole",
        lambda o: of(o, "ServiceMonitor", "gateway")["spec"].update(jobLabel="app.kubernetes.io/name"),
        "the alerts look for penstock",
    ),
    "a volume of nobody": (
        "whole",
        lambda o: of(o, "StatefulSet", "valkey")["spec"].pop("volumeClaimTemplates"),
        "volumes and mounts differ",
    ),
    "a field of a later release": (
        "hpa",
        lambda o: container(o, "gateway").update(restartPolicyRules=[]),
        "restartPolicyRules",
    ),
    "KEDA: a misspelt key": (
        "keda-prometheus",
        lambda o: trigger(o).update(activationTreshold="0"),
        "activationTreshold",
    ),
    "KEDA: a number": ("keda-prometheus", lambda o: trigger(o).update(threshold=1), "not of type 'string'"),
    "KEDA: lost metrics look idle": (
        "keda-prometheus",
        lambda o: trigger(o).pop("ignoreNullValues"),
        "ignoreNullValues",
    ),
    "KEDA: a metric of nobody": (
        "keda-prometheus",
        lambda o: trigger(o).update(query='max(penstock_wanted_workers{pool="tiny"})'),
        "no metric is called penstock_wanted_workers",
    ),
    "KEDA: a label of nobody": (
        "keda-prometheus",
        lambda o: trigger(o).update(query='max(penstock_desired_workers{pool="tiny",tier="a"})'),
        "no label ['tier']",
    ),
    "KEDA: fewer than the autoscaler wants": (
        "keda-prometheus",
        lambda o: of(o, "ScaledObject", "worker-tiny")["spec"].update(maxReplicaCount=3),
        "may want 4",
    ),
    "KEDA: zero on missing numbers": (
        "keda-prometheus",
        lambda o: of(o, "ScaledObject", "worker-tiny")["spec"].pop("fallback"),
        "'fallback' is a required property",
    ),
    "KEDA: a flag that is none": ("keda-sqs", lambda o: trigger(o).update(scaleOnInFlight="yes"), "is not one of"),
    "KEDA: the largest, not the sum": (
        "keda-sqs",
        lambda o: of(o, "ScaledObject", "worker-tiny")["spec"]["advanced"].pop("scalingModifiers"),
        "not the sum",
    ),
    "KEDA: no identity": (
        "keda-sqs",
        lambda o: of(o, "TriggerAuthentication", "penstock-aws")["metadata"].update(name="other"),
        "no TriggerAuthentication penstock-aws",
    ),
}


@pytest.mark.parametrize(("overlay", "change", "told"), WRONG.values(), ids=WRONG)
def test_a_wrong_manifest_is_found(overlay: str, change: Change, told: str) -> None:
    objects = copy.deepcopy(rendered(overlay))
    change(objects)
    found = complaints(objects)
    assert any(told in one for one in found), found
