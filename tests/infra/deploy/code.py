"""The code's own command lines, environment variables, metrics and native libraries."""

from __future__ import annotations

import re
import runpy
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any
from unittest.mock import patch

import promql_parser
import setuptools
import typer
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from producers.admin.fleet import Fleet, Pool, Scaling
from producers.connection.storage import Storage
from producers.contract import keys
from producers.contract.profile import Profile
from producers.gateway.metrics import GPU_FIGURES, WORKER_FIGURES, Metrics
from producers.store.measurements import ALL, ENERGY, HISTOGRAMS, Tally
from producers.store.outbox import Backlog, Due
from producers.store.waiting import Pressure
from tests.in_process import app
from tests.processes import ROOT

#: Variables that others read: Python and its libraries, NVIDIA's toolkit, Grafana.
OF_OTHERS = {
    *("HOME", "PATH", "PYTHONUNBUFFERED", "HF_HOME", "HF_TOKEN"),
    *("NVIDIA_VISIBLE_DEVICES", "NVIDIA_DRIVER_CAPABILITIES"),
    *("GF_AUTH_ANONYMOUS_ENABLED", "GF_SECURITY_ADMIN_PASSWORD__FILE", "GF_ANALYTICS_REPORTING_ENABLED"),
}
#: Labels that Prometheus itself gives, and of histograms.
OF_PROMETHEUS = {"job", "instance", "le"}
#: Time (s) beside the drain that a process has before it is killed.
MARGIN_S = 30


# ---- command lines ------------------------------------------------------------------------------------------------


@cache
def penstock() -> Any:
    """The command, which takes a while to be made."""
    return typer.main.get_command(app)


def parsed(argv: Sequence[str]) -> dict[str, Any]:
    """The options of `penstock ARGV`, defaults too; the servers are in its environment. Raises ValueError."""
    command = penstock()
    words = list(argv)
    try:
        with patch.dict("os.environ", BROKER_URL="redis://valkey:6379/0"):
            context = command.make_context("penstock", list(words))
            while hasattr(command, "resolve_command"):
                name, command, words = command.resolve_command(context, words)
                context = command.make_context(name, words, parent=context)
    except Exception as error:  # typer's own, of a module that is not public
        raise ValueError(f"penstock {' '.join(argv)}: {getattr(error, 'message', error)}") from error
    return dict(context.params)


def grace(argv: Sequence[str]) -> float:
    """Least time (s) from SIGTERM to SIGKILL: the drain time and MARGIN_S. A `local` actuator has workers' own."""
    options = parsed(argv)
    drain = options.get("drain_timeout", 0.0)
    if str(options.get("actuator")).startswith("local"):
        drain = parsed(["worker", "--model", "tiny"])["drain_timeout"]
    return float(drain) + MARGIN_S


# ---- environment --------------------------------------------------------------------------------------------------


@cache
def variables() -> frozenset[str]:
    """Environment variables that the code reads."""
    found = set(OF_OTHERS)
    for package in ("engine", "producers", "workers"):
        for path in (ROOT / package).rglob("*.py"):
            text = path.read_text("utf-8")
            found |= set(re.findall(r"""environ(?:\.get\(|\[)\s*["'](\w+)["']""", text))
    return frozenset(found | set(_options(penstock())))


def _options(command: Any) -> Iterator[str]:
    for param in command.params:
        yield from [param.envvar] if isinstance(param.envvar, str) else param.envvar or ()
    for one in getattr(command, "commands", {}).values():
        yield from _options(one)


# ---- metrics ------------------------------------------------------------------------------------------------------


@cache
def metrics() -> dict[str, set[str]]:
    """Metric -> its labels, as a gateway tells them of a system that has one of everything."""
    gateway = Metrics(lambda kind: 0)
    gateway.answered("GET", "/livez", 200, 0.1)
    gateway.submitted("tiny", "default")
    gateway.refused("queue_full")
    gateway.fleet = _fleet()
    queue = keys.version_queue("tiny", "v")
    gateway.waiting, gateway.overload = {queue: {"default": 1}}, {queue: Pressure()}
    gateway.measured = {"tiny": _measured()}
    gateway.source_items = {("orders", "done"): 1}
    gateway.storage = {"store": Storage(1, 2)}
    families = text_string_to_metric_families(generate_latest(gateway.registry).decode())
    return {sample.name: set(sample.labels) for family in families for sample in family.samples}


def _measured() -> dict[str, int]:
    tally = Tally()
    for histogram in HISTOGRAMS:
        tally.observe(histogram, 1.0, "default" if histogram.by_tier else ALL)
    tally.add(ENERGY, 1, "busy")
    return tally.fields()


def _fleet() -> Fleet:
    gpu = {"uuid": "GPU-0", "slowed_by": ["heat"], **{key: 1 for *_, key, _ in GPU_FIGURES}}
    profile = Profile(knee=8, tokens_per_s=100, ttft_p95=0.1, cold_start={"total": 2})
    figures = {key: 1 for *_, key, _ in WORKER_FIGURES}
    worker = {"worker": "w", "version": "v", "gpu": gpu, "profile": {"ttft_p95": 0.1, "duty": 0.5}, **figures}
    pool = Pool("tiny@v.f", "tiny", workers=[worker], oldest_s={"default": 1.0})
    state = {"at": 1, "model": "tiny", "wanted": 1, "starts": {"failures": 1}, "actual": {"standbys": 1}}
    scaling = Scaling(leads="a", states={"tiny": state}, profiles={"tiny@v": profile})
    return Fleet([pool], swept={"sent": 1}, webhooks=Backlog({"due": 1}, {None: Due(1, 1.0)}), at=1.0, scaling=scaling)


def wrong_in(query: str) -> list[str]:
    """The faults of a PromQL query: metrics that nobody exports, labels that they lack."""
    try:
        expression = promql_parser.parse(query)
    except ValueError as error:
        return [f"{query}: {error}"]
    wrong: list[str] = []
    for selector in _selectors(expression):
        if selector.name == "up":
            continue
        labels = metrics().get(selector.name)
        if labels is None:
            wrong.append(f"no metric is called {selector.name}")
        elif lacks := {matcher.name for matcher in selector.matchers.matchers} - labels - OF_PROMETHEUS:
            wrong.append(f"{selector.name} has no label {sorted(lacks)}")
    grouped = {label for one in re.findall(r"(?:by|on)\s*\(([^)]*)\)", query) for label in re.findall(r"\w+", one)}
    known = {label for selector in _selectors(expression) for label in metrics().get(selector.name, set())}
    strange = sorted(grouped - known - made_in(query) - OF_PROMETHEUS)
    return wrong + [f"nothing in {query} has a label {label}" for label in strange]


def made_in(query: str) -> set[str]:
    """The labels that a query makes of others (`label_replace`)."""
    return set(re.findall(r'"(\w+)",\s*"\$\d"', query))


def _selectors(node: Any) -> Iterator[Any]:
    if type(node).__name__ == "VectorSelector":
        yield node
    parts = [getattr(node, name, None) for name in ("lhs", "rhs", "expr", "vector_selector", "args")]
    for part in parts:
        for one in part if isinstance(part, list) else [part]:
            if one is not None:
                yield from _selectors(one)


# ---- native libraries ---------------------------------------------------------------------------------------------


def native_libraries() -> list[str]:
    """The libraries that setup.py builds on x86-64, as paths within the wheel."""
    with (
        patch.object(setuptools, "setup") as setup,
        patch("platform.machine", return_value="x86_64"),
    ):
        runpy.run_path(str(ROOT / "setup.py"))
    return [f"{extension.name.replace('.', '/')}.so" for extension in setup.call_args.kwargs["ext_modules"]]
