"""Values that several files of `infra/` repeat: each is compared with the one place in the code that has it.

Beside these, each platform's own tests parse its commands, compare its variables with those that the code reads, and
its times to stop with the code's drain times.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
import shutil
import tomllib
from collections.abc import Callable, Iterator
from operator import itemgetter
from pathlib import Path
from typing import Any

import pytest

from engine.text.checkpoint import model_version
from producers.admin.deployment import CA, DAYS, make
from producers.broker.sqs.address import lists, read, sqs_name
from producers.contract import keys
from producers.gateway.health import router
from producers.gateway.settings import GatewaySettings
from tests.exhaustive import one_of_each
from tests.infra.deploy.code import parsed
from tests.infra.deploy.processes import Process, processes
from tests.infra.deploy.templates import document, documents, template
from tests.processes import ROOT
from workers.autoscaler.policy import Rules
from workers.autoscaler.pools import one_pool
from workers.library.reference import bundled
from workers.runtime.health import Health

#: What is compared, beside the code itself.
FILES = ("infra", "Makefile", "Procfile", "pyproject.toml", "docs/run/deploy.md")
GATEWAY_PORT: int = parsed(["gateway"])["port"]
#: The port in the URLs that `penstock secrets make` writes.
SERVER_PORT: int = inspect.signature(make).parameters["port"].default
#: A server with and without TLS beside each other.
SERVER_PORTS = {SERVER_PORT, SERVER_PORT + 1}

Check = Callable[[Path], Iterator[str]]


# ---- the image ----------------------------------------------------------------------------------------------------


def containerfile(root: Path) -> str:
    return (root / "infra/container/Containerfile").read_text("utf-8")


def instructions(root: Path, name: str) -> list[str]:
    """The arguments of each instruction of this name, on one line each."""
    joined = containerfile(root).replace("\\\n", " ")
    return re.findall(rf"^{name} (.*)$", joined, re.MULTILINE)


def environment(root: Path) -> dict[str, str]:
    """The variables that the image sets."""
    return dict(word.split("=", 1) for line in instructions(root, "ENV") for word in line.split())


def user_of_the_image(root: Path) -> str:
    (number,) = re.findall(r"useradd --uid (\d+)", containerfile(root))
    return str(number)


def volumes(root: Path) -> set[str]:
    (text,) = instructions(root, "VOLUME")
    return set(document(text))


def users(root: Path) -> Iterator[str]:
    """Every platform runs the image as the user that it makes."""
    number = user_of_the_image(root)
    for user in instructions(root, "USER"):
        if user != f"{number}:{number}":
            yield f"Containerfile: USER is {user}, and the user is {number}"
    for process in processes(root):
        yield from (f"{process.where}: its user is {user}, not {number}" for user in process.users - {number})
    page = (root / "docs/run/deploy.md").read_text("utf-8")
    yield from (
        f"docs/run/deploy.md: user {user} is not {number}" for user in re.findall(r"user (\d+)", page) if user != number
    )


def folders(root: Path) -> Iterator[str]:
    """What is mounted, and what variables name, is a folder that the image has for it."""
    variables, writable = environment(root), volumes(root)
    named = {variables[name] for name in ("HOME", "PENSTOCK_MODELS", "TRITON_CACHE_DIR", "FILES_DIR")}
    if named != writable:
        yield f"Containerfile: VOLUME is {sorted(writable)}, and variables name {sorted(named)}"
    (line,) = [line for line in instructions(root, "RUN") if "install --directory" in line]
    created = set(re.findall(r"(?<= )/\S+", line.partition("install --directory")[2]))
    if missing := writable - created - {variables["HOME"]}:
        yield f"Containerfile: {sorted(missing)} are not made"
    comment = set(re.findall(r"^#   (/\S+)", containerfile(root), re.MULTILINE))
    if comment != writable:
        yield f"Containerfile: its comment names {sorted(comment)}"
    settings = Path(CA).parent
    for process in processes(root):
        for folder in sorted(process.folders - writable):
            if Path(folder) != settings and settings not in Path(folder).parents:
                yield f"{process.where}: the image has no folder {folder}"
        for name in sorted(process.environment.keys() & variables.keys()):
            value = process.environment[name]
            if process.platform != "systemd" and value != variables[name]:
                yield f"{process.where}: {name} is {value}, and {variables[name]} in the image"


def tags(root: Path) -> Iterator[str]:
    """Images have the names and targets that docs/run/deploy.md builds."""
    page = (root / "docs/run/deploy.md").read_text("utf-8")
    built = dict(re.findall(r"docker build -f infra/container/Containerfile --target (\w+) -t (\S+) \.", page))
    stages = set(re.findall(r"^FROM \S+ AS (\S+)$", containerfile(root), re.MULTILINE))
    yield from (f"docs/run/deploy.md: the Containerfile has no target {target}" for target in built.keys() - stages)
    for path in sorted((root / "infra").rglob("*.yaml")):
        text = path.read_text("utf-8")
        named = set(re.findall(r"(?:image|value): (penstock[\w-]*:\S+)", text))
        yield from (f"{path.name}: nobody builds {image}" for image in sorted(named - set(built.values())))
    compose = document((root / "infra/compose/compose.yaml").read_text("utf-8"))["x-penstock"]
    if built.get(compose["build"]["target"]) != compose["image"]:
        yield f"compose.yaml: {compose['image']} is built as {compose['build']['target']}"


def packages(root: Path) -> Iterator[str]:
    """Python's version, extras, the command and the environment's path are the project's own."""
    project = tomllib.loads((root / "pyproject.toml").read_text("utf-8"))["project"]
    oldest = project["requires-python"].removeprefix(">=")
    makefile = (root / "Makefile").read_text("utf-8")
    (python,) = re.findall(r"^ARG PYTHON=([\d.]+)-slim-bookworm$", containerfile(root), re.MULTILINE)
    (locked,) = re.findall(r"--python-version ([\d.]+)", makefile)
    if not python == locked == oldest:
        yield f"Containerfile: Python is {python}; locks are for {locked}, and the oldest is {oldest}"
    (listed,) = re.findall(r"^EXTRAS := (.*)$", makefile, re.MULTILINE)
    (installed,) = re.findall(r'^ARG EXTRAS="(.*)"$', containerfile(root), re.MULTILINE)
    if installed.split() != listed.split():
        yield f"Containerfile: extras are {installed}, and {listed} are locked"
    (entry,) = instructions(root, "ENTRYPOINT")
    command = document(entry)[-1]
    if command not in project["scripts"]:
        yield f"Containerfile: no command is called {command}"
    prefix = environment(root)["PATH"].partition("/bin")[0]
    for path in sorted((root / "infra").rglob("*")):
        if path.suffix in (".service", ".yaml") or path.name == "Containerfile":
            for other in sorted(set(re.findall(r"/opt/\w+", path.read_text("utf-8"))) - {prefix}):
                yield f"{path.name}: Penstock is in {prefix}, not in {other}"
    gpu = (root / "infra/aws/ec2-gpu.yaml").read_text("utf-8")
    (extras,) = re.findall(r'\.whl\)\[([\w,]+)\]"', gpu)
    yield from (
        f"ec2-gpu.yaml: there is no extra {extra}"
        for extra in extras.split(",")
        if extra not in project["optional-dependencies"]
    )
    (version,) = re.findall(r"Python ([\d.]+) or newer", gpu)
    if version != oldest:
        yield f"ec2-gpu.yaml: an image needs Python {version}, and the code {oldest}"


# ---- addresses ----------------------------------------------------------------------------------------------------


def ports(root: Path) -> Iterator[str]:
    """Others look for a process on the port at which it listens, the same one on each platform."""
    by_name: dict[str, set[int]] = {}
    for process in processes(root):
        port = process.port
        looked_for = process.ports | {number for number, _ in process.probes}
        yield from (
            f"{process.where}: it listens on {port}, and is looked for on {other}"
            for other in sorted(looked_for - {port})
        )
        if port is not None:
            by_name.setdefault(process.argv[0], set()).add(port)
    yield from (f"{name}: its ports are {sorted(numbers)}" for name, numbers in by_name.items() if len(numbers) > 1)
    numbers = sorted(port for each in by_name.values() for port in each)
    if len(set(numbers)) != len(numbers):
        yield f"two processes have one port: {by_name}"
    if by_name["gateway"] != {GATEWAY_PORT}:
        yield f"the gateway's own port is {GATEWAY_PORT}, not {by_name['gateway']}"


def probed_paths(root: Path) -> Iterator[str]:
    """Health checks ask for what there is."""
    of_gateways = {getattr(route, "path", "") for route in router.routes}
    for process in processes(root):
        for _, path in sorted(process.probes):
            known = path in of_gateways if process.argv[0] == "gateway" else Health(None).answer(path)[0] != 404
            if not known:
                yield f"{process.where}: there is no {path}"


def balancer(root: Path) -> Iterator[str]:
    """ECS: the balancer, its target group and the tasks' security group name the gateway's port and times."""
    resources = template((root / "infra/aws/ecs.yaml").read_text("utf-8"))["Resources"]
    properties = {name: one["Properties"] for name, one in resources.items()}
    gateway = next(one for one in processes(root) if one.where == "ecs, gateway")
    target, group = properties["Targets"], properties["TaskGroup"]["SecurityGroupIngress"][0]
    named = {
        "Targets": target["Port"],
        "TaskGroup": group["FromPort"],
        "TaskGroup's end": group["ToPort"],
        "GatewayService": properties["GatewayService"]["LoadBalancers"][0]["ContainerPort"],
    }
    yield from (f"ecs.yaml: {name} has port {port}" for name, port in named.items() if port != gateway.port)
    if target["HealthCheckPath"] not in {getattr(route, "path", "") for route in router.routes}:
        yield f"ecs.yaml: there is no {target['HealthCheckPath']}"
    (attribute,) = target["TargetGroupAttributes"]
    if float(attribute["Value"]) != parsed(gateway.argv)["drain_timeout"]:
        yield f"ecs.yaml: targets leave after {attribute['Value']} s, and the gateway drains for another time"
    (idle,) = properties["Balancer"]["LoadBalancerAttributes"]
    if float(idle["Value"]) < 2 * heartbeat():
        yield f"ecs.yaml: the balancer cuts streams that are silent for {idle['Value']} s"


def heartbeat() -> float:
    """Seconds after which a silent stream gets a comment."""
    (default,) = [one.default for one in dataclasses.fields(GatewaySettings) if one.name == "heartbeat"]
    return float(default)


def prometheus(root: Path) -> Iterator[str]:
    """Prometheus, and the pods' network, reach gateways at their port."""
    config = document((root / "infra/prometheus/prometheus.yml").read_text("utf-8"))
    (job,) = config["scrape_configs"]
    (names,) = job["dns_sd_configs"]
    compose = document((root / "infra/compose/compose.yaml").read_text("utf-8"))["services"]
    if names["port"] != GATEWAY_PORT:
        yield f"prometheus.yml: port {names['port']} is not the gateway's"
    yield from (f"prometheus.yml: compose has no service {name}" for name in names["names"] if name not in compose)
    secrets = {f"/run/secrets/{secret}" for secret in compose["prometheus"]["secrets"]}
    if job["authorization"]["credentials_file"] not in secrets:
        yield f"prometheus.yml: compose mounts {sorted(secrets)}"
    policies = list(documents((root / "infra/kubernetes/base/network.yaml").read_text("utf-8")))
    (ingress,) = [one["spec"]["ingress"] for one in policies if one["metadata"]["name"] == "gateway"]
    if {port["port"] for rule in ingress for port in rule["ports"]} != {GATEWAY_PORT}:
        yield f"network.yaml: callers reach no gateway at {GATEWAY_PORT}"


def servers(root: Path) -> Iterator[str]:
    """The way to the store is open at the port that `penstock secrets make` writes into URLs."""
    compose = document((root / "infra/compose/compose.yaml").read_text("utf-8"))["services"]
    words = compose["valkey"]["command"]
    if words[words.index("--tls-port") + 1] != str(SERVER_PORT):
        yield f"compose.yaml: the server does not listen on {SERVER_PORT}"
    policies = list(documents((root / "infra/kubernetes/base/network.yaml").read_text("utf-8")))
    (egress,) = [one["spec"]["egress"] for one in policies if one["metadata"]["name"] == "servers"]
    if missing := SERVER_PORTS - {port["port"] for rule in egress for port in rule["ports"]}:
        yield f"network.yaml: no way out to {sorted(missing)}"
    ecs = template((root / "infra/aws/ecs.yaml").read_text("utf-8"))
    if ecs["Parameters"]["StorePort"]["Default"] != SERVER_PORT:
        yield f"ecs.yaml: StorePort is not {SERVER_PORT}"
    gpu = template((root / "infra/aws/ec2-gpu.yaml").read_text("utf-8"))["Resources"]
    ranges = [(one["FromPort"], one["ToPort"]) for one in gpu["Instances"]["Properties"]["SecurityGroupEgress"]]
    if (min(SERVER_PORTS), max(SERVER_PORTS)) not in ranges:
        yield f"ec2-gpu.yaml: no way out to {sorted(SERVER_PORTS)}"


# ---- numbers of workers, and queues -------------------------------------------------------------------------------


def scaling(root: Path) -> Iterator[str]:
    """Targets and times of other scalers are those of Penstock's rules."""
    rules = Rules()
    tasks, cool_down = rules.headroom * rules.default_knee, rules.cool_down
    cloudwatch = template((root / "infra/aws/ecs-cloudwatch.yaml").read_text("utf-8"))
    tracking = cloudwatch["Resources"]["WorkerByQueue"]["Properties"]["TargetTrackingScalingPolicyConfiguration"]
    (scaled,) = [
        one["spec"]
        for one in documents((root / "infra/kubernetes/components/keda-sqs/worker-tiny.yaml").read_text("utf-8"))
        if one["kind"] == "ScaledObject"
    ]
    named: dict[str, tuple[Any, float]] = {
        "ecs-cloudwatch.yaml: TasksPerWorker": (cloudwatch["Parameters"]["TasksPerWorker"]["Default"], tasks),
        "ecs-cloudwatch.yaml: ScaleInCooldown": (tracking["ScaleInCooldown"], cool_down),
        "keda-sqs: target": (scaled["advanced"]["scalingModifiers"]["target"], tasks),
        "keda-sqs: cooldownPeriod": (scaled["cooldownPeriod"], cool_down),
        **{
            f"keda-sqs: queueLength of {trigger['name']}": (trigger["metadata"]["queueLength"], float(int(tasks)))
            for trigger in scaled["triggers"]
        },
    }
    yield from (f"{name} is {value}, not {own:g}" for name, (value, own) in named.items() if float(value) != own)
    for process in processes(root):
        if process.argv[0] == "autoscaler":
            yield from _autoscaler(process, cool_down)


def _autoscaler(process: Process, cool_down: float) -> Iterator[str]:
    options = parsed(process.argv)
    if options["cool_down"] not in (None, cool_down):
        yield f"{process.where}: its cool-down is {options['cool_down']:g} s, not {cool_down:g}"
    try:
        one_pool({"model": "tiny", "max": options["max_workers"]}, options["rule"] or ())
    except ValueError as error:
        yield f"{process.where}: {error}"


def most_workers(root: Path) -> Iterator[str]:
    """All platforms start at most as many workers."""
    numbers = {
        one.where: number
        for one in processes(root)
        if one.argv[0] == "autoscaler" and (number := parsed(one.argv)["max_workers"]) is not None
    }
    for name in ("ecs", "ecs-cloudwatch", "ec2-gpu"):
        parameters = template((root / f"infra/aws/{name}.yaml").read_text("utf-8"))["Parameters"]
        numbers[f"{name}.yaml"] = parameters["MaxWorkers"]["Default"]
    for path in sorted((root / "infra/kubernetes/components").rglob("worker-tiny.yaml")):
        for one in documents(path.read_text("utf-8")):
            if most := one["spec"].get("maxReplicaCount") or one["spec"].get("maxReplicas"):
                numbers[path.parent.name] = most
    if len(set(numbers.values())) != 1:
        yield f"the largest numbers of workers differ: {numbers}"


def queues(root: Path) -> Iterator[str]:
    """CloudWatch counts the queues that workers of the bundled model take from."""
    cloudwatch = (root / "infra/aws/ecs-cloudwatch.yaml").read_text("utf-8")
    prefix = template(cloudwatch)["Parameters"]["QueuePrefix"]["Default"]
    counted = {prefix + suffix for suffix in re.findall(r"\$\{QueuePrefix\}(-\w+)", cloudwatch)}
    queue = keys.version_queue("tiny", model_version(bundled()["tiny"]))
    own = {sqs_name(read("sqs://us-east-1"), name) for name, _ in lists(queue)}
    if counted != own:
        yield f"ecs-cloudwatch.yaml: it counts {sorted(counted)}, and the queues are {sorted(own)}"
    ecs = template((root / "infra/aws/ecs.yaml").read_text("utf-8"))["Parameters"]["QueuePrefix"]["Default"]
    if ecs != read("sqs://us-east-1").prefix:
        yield f"ecs.yaml: QueuePrefix is {ecs}"


def models(root: Path) -> Iterator[str]:
    """Where nothing else is said, the model is a bundled one, which needs no hub."""
    named = {"example.env": re.findall("^MODEL=(.*)$", (root / "infra/compose/example.env").read_text("utf-8"), re.M)}
    named["Procfile"] = re.findall(r"\$\{MODEL:-(\w+)\}", (root / "Procfile").read_text("utf-8"))
    for name in ("ecs", "ec2-gpu"):
        parameters = template((root / f"infra/aws/{name}.yaml").read_text("utf-8"))["Parameters"]
        named[f"{name}.yaml"] = [parameters["Model"]["Default"]]
    for process in processes(root):
        if process.platform != "systemd" and (model := parsed(process.argv).get("model")):
            named[process.where] = [model] if isinstance(model, str) else model
    for where, values in named.items():
        yield from (f"{where}: no bundled model is called {model}" for model in values if model not in bundled())


# ---- machines of one's own ----------------------------------------------------------------------------------------


def units(root: Path) -> Iterator[str]:
    """Units write where systemd lets them, read the files of docs/run/deploy.md, and have the code's defaults."""
    page = (root / "docs/run/deploy.md").read_text("utf-8")
    example = (root / "infra/systemd/penstock.env.example").read_text("utf-8")
    settings = dict(re.findall(r"^#?([A-Z_]+)=(\S+)$", example, re.MULTILINE))
    for path in sorted((root / "infra/systemd").glob("*.service")):
        text = path.read_text("utf-8")
        state, cache = (re.findall(rf"^{name}Directory=(\w+)$", text, re.MULTILINE)[0] for name in ("State", "Cache"))
        written = set(re.findall(r"/var/\w+/\w+", text)) | set(re.findall(r"/var/\w+/\w+", settings["FILES_DIR"]))
        for folder in sorted(written - {f"/var/lib/{state}", f"/var/cache/{cache}"}):
            yield f"{path.name}: it may not write {folder}"
        for file in sorted(set(re.findall(r"/etc/[\w/.-]+", text))):
            name = Path(file).name
            if "worker-" not in name and "secrets" not in Path(file).parts and file not in page:
                yield f"{path.name}: docs/run/deploy.md does not say what {file} is"
    (gateway,) = [one for one in processes(root) if one.where == "systemd, penstock-gateway"]
    defaults = {"HOST": str(parsed(["gateway"])["host"]), "PORT": str(GATEWAY_PORT)}
    for name, value in defaults.items():
        if gateway.environment[name] != value:
            yield f"penstock-gateway.service: {name} is {gateway.environment[name]}, and {value} in the code"
    if settings["PORT"] != defaults["PORT"]:
        yield f"penstock.env.example: PORT is {settings['PORT']}"
    procfile = (root / "Procfile").read_text("utf-8")
    for name, value in defaults.items():
        yield from (
            f"Procfile: {name} is {other}"
            for other in re.findall(rf"\$\{{{name}:-([^}}]*)\}}", procfile)
            if other != value
        )
    if f"Certificates last {DAYS} days" not in page:
        yield f"docs/run/deploy.md: certificates last {DAYS} days"


CHECKS: list[Check] = [
    *(users, folders, tags, packages),
    *(ports, probed_paths, balancer, prometheus, servers),
    *(scaling, most_workers, queues, models, units),
]


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_values_are_the_codes(check: Check) -> None:
    assert list(check(ROOT)) == []


@pytest.fixture(scope="module")
def copied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("root")
    for name in FILES:
        target = root / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, target, ignore=shutil.ignore_patterns("__pycache__", "secrets"))
        else:
            shutil.copy(ROOT / name, target)
    return root


ECS, COMPOSE, CONTAINERFILE = "infra/aws/ecs.yaml", "infra/compose/compose.yaml", "infra/container/Containerfile"
#: What is wrong -> the check, the file, what is changed in it to what, and what the check says.
WRONG: dict[str, tuple[Check, str, str, str, str]] = {
    "another user in the image": (users, CONTAINERFILE, "USER 10001:10001", "USER 10001:0", "USER is 10001:0"),
    "another user on ECS": (users, ECS, 'User: "10001"', 'User: "1000"', "its user is 1000"),
    "another group on Kubernetes": (
        users,
        "infra/kubernetes/base/gateway.yaml",
        "fsGroup: 10001",
        "fsGroup: 1001",
        "gateway: its user is 1001",
    ),
    "no volume for a variable": (folders, CONTAINERFILE, 'VOLUME ["/tmp", ', "VOLUME [", "VOLUME is"),
    "a folder that is not made": (folders, CONTAINERFILE, "/cache/triton /files\n", "/cache/triton\n", "are not made"),
    "a folder that no image has": (folders, COMPOSE, "[models:/models]", "[models:/model]", "no folder /model"),
    "a variable of another folder": (folders, COMPOSE, "FILES_DIR: /files", "FILES_DIR: /tmp/files", "FILES_DIR is"),
    "an image that nobody builds": (
        tags,
        "infra/kubernetes/base/worker-tiny.yaml",
        "penstock:cpu",
        "penstock:latest",
        "nobody builds penstock:latest",
    ),
    "another target": (tags, COMPOSE, "target: cpu", "target: cuda", "penstock:cpu is built as cuda"),
    "another Python": (packages, CONTAINERFILE, "PYTHON=3.11", "PYTHON=3.12", "Python is 3.12"),
    "an extra less": (packages, CONTAINERFILE, ' tracing"', '"', "extras are"),
    "another environment": (
        packages,
        "infra/systemd/penstock-sweeper.service",
        "/opt/penstock",
        "/opt/llm",
        "not in /opt/llm",
    ),
    "an extra that is gone": (packages, "infra/aws/ec2-gpu.yaml", "worker,gpu,aws", "worker,cuda", "no extra cuda"),
    "a probe of another port": (ports, COMPOSE, ":8000/readyz", ":8080/readyz", "looked for on 8080"),
    "a probe of another port on ECS": (ports, ECS, ":9100/livez", ":9101/livez", "looked for on 9101"),
    "another port on one platform": (
        ports,
        "infra/systemd/penstock-webhooks.service",
        "--health-port 9101",
        "--health-port 9201",
        "webhooks: its ports are [9101, 9201]",
    ),
    "a probe of what is not there": (
        probed_paths,
        "infra/kubernetes/base/webhooks.yaml",
        "path: /readyz",
        "path: /healthz",
        "there is no /healthz",
    ),
    "a gateway's probe": (probed_paths, COMPOSE, "/readyz", "/ready", "there is no /ready"),
    "a balancer of another port": (balancer, ECS, "      Port: 8000", "      Port: 80", "Targets has port 80"),
    "a balancer that forgets too soon": (
        balancer,
        ECS,
        'timeout_seconds, Value: "30"',
        'timeout_seconds, Value: "5"',
        "5 s",
    ),
    "a balancer that cuts streams": (
        balancer,
        ECS,
        'timeout_seconds, Value: "60"',
        'timeout_seconds, Value: "9"',
        "cuts",
    ),
    "Prometheus at another port": (prometheus, "infra/prometheus/prometheus.yml", "8000", "9090", "port 9090"),
    "callers at another port": (
        prometheus,
        "infra/kubernetes/base/network.yaml",
        "port: 8000",
        "port: 80",
        "reach no gateway",
    ),
    "a server at another port": (servers, COMPOSE, '--tls-port, "6379"', '--tls-port, "6380"', "does not listen"),
    "no way to the store": (servers, ECS, "    Default: 6379", "    Default: 6380", "StorePort"),
    "another target of CloudWatch": (
        scaling,
        "infra/aws/ecs-cloudwatch.yaml",
        "Default: 6.4",
        "Default: 8",
        "TasksPerWorker is 8",
    ),
    "a rule that is gone": (scaling, ECS, "start_limit=900", "start_limits=900", "start_limits"),
    "another cool-down": (scaling, COMPOSE, "--cool-down 300", "--cool-down 30", "cool-down is 30 s"),
    "more workers": (most_workers, "infra/aws/ec2-gpu.yaml", "Default: 4", "Default: 5", "differ"),
    "a queue of nobody": (queues, "infra/aws/ecs-cloudwatch.yaml", "}-flex", "}-slow", "it counts"),
    "a model of nobody": (models, "infra/compose/example.env", "MODEL=tiny", "MODEL=small", "is called small"),
    "a folder that units may not write": (
        units,
        "infra/systemd/penstock-worker@.service",
        "/var/cache/penstock/triton",
        "/var/cache/triton",
        "may not write /var/cache/triton",
    ),
    "a file of nobody": (
        units,
        "infra/systemd/penstock-sources.service",
        "/etc/penstock/sources.toml",
        "/etc/penstock/source.toml",
        "what /etc/penstock/source.toml is",
    ),
    "another address": (units, "infra/systemd/penstock-gateway.service", "PORT=8000", "PORT=80", "PORT is 80"),
}


@pytest.mark.parametrize("wrong", one_of_each(itemgetter(0), WRONG))
def test_another_value_is_noticed(copied: Path, wrong: str) -> None:
    check, name, text, other, told = WRONG[wrong]
    path = copied / name
    whole = path.read_text("utf-8")
    assert text in whole
    path.write_text(whole.replace(text, other))
    try:
        complaints = list(check(copied))
    finally:
        path.write_text(whole)
    assert any(told in complaint for complaint in complaints), complaints
