"""What SQS refuses is said where it is looked for: at a worker's start, and in /readyz of workers and gateways."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from redis import Redis

from producers.broker.sqs.address import lists, read, sqs_name
from producers.contract import keys
from producers.gateway import GatewaySettings, health
from tests.aws import Aws
from tests.aws_faults import Fault, Faults
from tests.processes import free_port
from tests.producers.gateway.conftest import Door, until
from tests.waiting import PATIENCE_S
from tests.workers.rig import POOL
from tests.workers.sqs.conftest import SqsRig
from workers.connect import check_queues
from workers.errors import Refused

NAMES = [sqs_name(read("sqs://us-east-1"), name) for name, _ in lists(POOL.version_queue)]


@pytest.fixture
def door(aws: Aws, valkey_url: str, valkey: Redis, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Door]:
    """A gateway, where a model is announced whose queues do not exist."""
    monkeypatch.setattr(health, "PATIENCE_S", 60.0)
    about = {"model": POOL.model, "version": POOL.version, "fingerprint": POOL.fingerprint}
    valkey.hset(keys.POOLS, POOL.queue, json.dumps(about))
    settings = GatewaySettings(aws.broker(), valkey_url, sweep=False, files_dir=str(tmp_path))
    door = Door(settings)
    yield door
    door.close()


def asked(port: int) -> Callable[[], dict[str, Any]]:
    return lambda: httpx.get(f"http://127.0.0.1:{port}/readyz", timeout=PATIENCE_S).json()


def test_a_worker_that_may_make_no_queues_names_them_and_who_may(faults: tuple[SqsRig, Faults]) -> None:
    rig, coming = faults
    coming.put(Fault("denied", "CreateQueue"))
    worker = rig.begin_worker()
    assert worker.process.wait(PATIENCE_S) != 0
    said = worker.log.read_text()
    assert f"queue {NAMES[0]} in us-east-1" in said
    assert "penstock aws setup --broker" in said
    assert "sqs:CreateQueue" in said
    assert not rig.store.exists(keys.MODELS), "nobody submits to a model whose queues are missing"


def test_a_worker_refuses_a_lease_that_outlasts_what_sqs_hides(sqs: SqsRig) -> None:
    with pytest.raises(Refused, match=r"visibility is 20 s; it must be longer than the worker's lease \(20 s\)"):
        check_queues(sqs.aws.broker(visibility="20"), sqs.store_url, (), lease=20.0)


def test_a_gateway_is_ready_when_the_queues_are_there(door: Door, aws: Aws) -> None:
    answer = httpx.get(f"{door.url}/readyz", timeout=PATIENCE_S)
    assert answer.status_code == 503
    assert f"queue {NAMES[0]} in us-east-1" in answer.json()["error"]["message"]
    assert "penstock aws setup" in answer.json()["checks"]["broker"]
    for name in NAMES:
        aws.client("sqs").create_queue(QueueName=name)
    until(lambda: httpx.get(f"{door.url}/readyz", timeout=PATIENCE_S).status_code == 200)


def test_a_worker_that_may_not_receive_is_not_ready_until_it_may(faults: tuple[SqsRig, Faults]) -> None:
    rig, coming = faults
    port = free_port()
    rig.worker(health_port=port)
    ready = asked(port)
    rig.until(lambda: ready()["status"] == "ready")
    coming.put(Fault("denied", "ReceiveMessage"))
    ids = rig.submit(2)  # they end polls that are under way; the next ones are refused
    rig.until(lambda: ready()["status"] == "not ready")
    assert "sqs:ReceiveMessage" in " ".join(ready()["reasons"])
    coming.calm()
    rig.until_settled(ids)
    rig.until(lambda: ready()["status"] == "ready")
