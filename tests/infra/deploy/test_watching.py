"""Prometheus' rules and Grafana's dashboards: every metric and label that they name is one that gateways export."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from typing import Any

import pytest

from tests.infra.deploy.code import OF_PROMETHEUS, made_in, metrics, parsed, wrong_in
from tests.infra.deploy.templates import document
from tests.processes import ROOT

PROMETHEUS = ROOT / "infra" / "prometheus"
GRAFANA = ROOT / "infra" / "grafana"
DASHBOARDS = {path.stem: json.loads(path.read_text("utf-8")) for path in (GRAFANA / "dashboards").glob("*.json")}
(GROUP,) = document((PROMETHEUS / "alerts.yml").read_text("utf-8"))["groups"]
RULES: dict[str, dict[str, Any]] = {rule["alert"]: rule for rule in GROUP["rules"]}
#: By dashboard and title. Two dashboards may have the same panel.
PANELS: dict[str, dict[str, Any]] = {
    f"{name}: {panel['title']}": panel for name, board in sorted(DASHBOARDS.items()) for panel in board["panels"]
}


def promtool(*arguments: str) -> None:
    """Where it is installed: CI does that."""
    if program := shutil.which("promtool"):
        ran = subprocess.run([program, *arguments], cwd=PROMETHEUS, capture_output=True, text=True)
        assert ran.returncode == 0, ran.stdout + ran.stderr


@pytest.mark.parametrize("name", RULES)
def test_an_alert_is_about_what_there_is(name: str) -> None:
    rule = RULES[name]
    assert wrong_in(rule["expr"]) == []
    assert name.startswith("Penstock")
    assert rule["labels"]["severity"] in ("page", "ticket")
    assert rule.keys() <= {"alert", "expr", "for", "labels", "annotations"}
    told = " ".join(rule["annotations"].values())
    for command in re.findall(r"`penstock ([^`]*)`", told):
        parsed(re.sub(r"\{\{.*?\}\}", "tiny", command).split())
    labels = made_in(rule["expr"]).union(*(its for metric, its in metrics().items() if metric in rule["expr"]))
    assert set(re.findall(r"\$labels\.(\w+)", told)) <= labels | OF_PROMETHEUS


def test_the_rules_are_prometheus_own() -> None:
    promtool("check", "rules", "alerts.yml")
    promtool("check", "config", "--syntax-only", "prometheus.yml")  # the key is nowhere here


def test_each_alert_is_made_to_fire_by_a_test() -> None:
    tests = document((PROMETHEUS / "alerts.test.yml").read_text("utf-8"))["tests"]
    checks = [check for test in tests for check in test["alert_rule_test"]]
    assert {check["alertname"] for check in checks if check["exp_alerts"]} == RULES.keys()


def test_the_rules_fire_when_they_should() -> None:
    promtool("test", "rules", "alerts.test.yml")


@pytest.mark.parametrize("name", PANELS)
def test_a_panel_shows_what_there_is(name: str) -> None:
    for target in PANELS[name]["targets"]:
        assert wrong_in(target["expr"].replace("$model", "tiny")) == []
        labels = set().union(*(its for metric, its in metrics().items() if metric in target["expr"]))
        assert set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"])) <= labels | OF_PROMETHEUS


def test_the_dashboards_cover_what_an_operator_asks() -> None:
    assert sorted(DASHBOARDS) == ["cost", "model", "penstock", "queue", "workers"]
    assert len({board["uid"] for board in DASHBOARDS.values()}) == len(DASHBOARDS)
    shown = " ".join(target["expr"] for panel in PANELS.values() for target in panel["targets"])
    wanted = """penstock_queued penstock_queued_oldest_seconds penstock_workers penstock_desired_workers
        penstock_pool_ttft_p95_seconds penstock_worker_generated_tokens_total penstock_worker_kv_blocks_used
        penstock_pool_cold_start_seconds penstock_dead_letters penstock_worker_start_failures
        penstock_queue_wait_seconds_bucket penstock_time_to_first_token_seconds_bucket penstock_task_seconds_bucket
        penstock_inter_token_seconds_bucket penstock_time_per_output_token_seconds_bucket penstock_tasks_total"""
    assert [name for name in wanted.split() if not re.search(rf"{name}\b", shown)] == []


@pytest.mark.parametrize("name", DASHBOARDS)
def test_places_do_not_overlap(name: str) -> None:
    panels = DASHBOARDS[name]["panels"]
    taken = [(x, y) for one in panels for x in range(*_span(one, "x", "w")) for y in range(*_span(one, "y", "h"))]
    assert len(taken) == len(set(taken))
    assert max(x for x, _ in taken) < 24
    assert len({one["id"] for one in panels}) == len(panels)


def _span(panel: dict[str, Any], place: str, size: str) -> tuple[int, int]:
    at = panel["gridPos"]
    return at[place], at[place] + at[size]


def test_grafana_is_told_where_prometheus_and_the_dashboard_are() -> None:
    folder = GRAFANA / "provisioning"
    (source,) = document((folder / "datasources" / "prometheus.yaml").read_text("utf-8"))["datasources"]
    assert {one["datasource"]["uid"] for one in PANELS.values()} == {source["uid"]}
    compose = document((ROOT / "infra" / "compose" / "compose.yaml").read_text("utf-8"))["services"]
    assert source["url"] == "http://prometheus:9090"
    (provider,) = document((folder / "dashboards" / "penstock.yaml").read_text("utf-8"))["providers"]
    mounted = [one.split(":") for one in compose["grafana"]["volumes"]]
    assert ["../grafana/dashboards", provider["options"]["path"], "ro"] in mounted


@pytest.mark.parametrize(
    ("query", "told"),
    [
        ('max(penstock_desird_workers{pool="tiny"})', "no metric is called penstock_desird_workers"),
        ('penstock_queued{pol="tiny"} > 0', "penstock_queued has no label ['pol']"),
        ("sum by (shard) (penstock_queued)", "has a label shard"),
        ("rate(penstock_gateway_requests[5m])", "no metric is called penstock_gateway_requests"),
        ("sum(penstock_queued", "parenthesis"),
    ],
)
def test_a_wrong_query_is_found(query: str, told: str) -> None:
    assert any(told in one for one in wrong_in(query)), wrong_in(query)
