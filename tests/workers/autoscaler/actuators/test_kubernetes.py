"""The actuator on Kubernetes: what it asks an API server for, which pods go, and what it says when it is refused."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import pytest_asyncio

from tests.workers.autoscaler.actuators.kubernetes_server import Kubernetes, crash
from workers.autoscaler import control
from workers.autoscaler.actuators import Actual, Actuator, ActuatorError, open_actuator

URL = "kubernetes://default/worker-tiny"


def opened(url: str) -> Actuator:
    made = open_actuator(url, model="tiny", broker="", store="")
    assert made is not None
    return made


@pytest.fixture
def kubernetes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Kubernetes]:
    made = Kubernetes(tmp_path)
    monkeypatch.setenv("KUBECONFIG", str(made.config))
    yield made
    made.close()


@pytest_asyncio.fixture
async def actuator(kubernetes: Kubernetes) -> AsyncIterator[Actuator]:
    made = opened(URL)
    yield made
    await made.aclose()


async def test_a_deployment_is_scaled_out_and_counted(kubernetes: Kubernetes, actuator: Actuator) -> None:
    assert await actuator.actual() == Actual(0, 0)
    await actuator.scale(3, [])
    assert await actuator.actual() == Actual(3, 3)
    assert "patch pods" not in kubernetes.asked, "costs are set only to scale in"
    assert kubernetes.asked.count("list hpas") == 1


async def test_the_idlest_pods_go(kubernetes: Kubernetes, actuator: Actuator) -> None:
    await actuator.scale(4, [])
    # The first pod has another worker, which is busier.
    names = ["worker-tiny-3.7.gpu0", "worker-tiny-2.7", "worker-tiny-0.7", "worker-tiny-1.7", "worker-tiny-3.7.gpu1"]
    await actuator.scale(2, names)
    assert set(kubernetes.pods) == {"worker-tiny-1", "worker-tiny-3"}
    await actuator.scale(2, ["worker-tiny-1.7"])
    await actuator.scale(0, ["worker-tiny-1.7"])
    assert not kubernetes.pods
    assert kubernetes.asked.count("patch pods") == 2, "nothing is marked while the number stays, or on the way to zero"


async def test_a_broken_pod_goes_before_the_idlest(kubernetes: Kubernetes, actuator: Actuator) -> None:
    await actuator.scale(4, [])
    kubernetes.pods["worker-tiny-3"]["status"]["phase"] = "Pending"
    await actuator.scale(2, ["worker-tiny-1.7", "worker-tiny-0.7", "worker-tiny-2.7"])
    assert set(kubernetes.pods) == {"worker-tiny-0", "worker-tiny-2"}


async def test_marks_of_an_interrupted_scale_in_do_not_outlive_the_load(
    kubernetes: Kubernetes, actuator: Actuator
) -> None:
    await actuator.scale(3, [])
    kubernetes.conflict = True
    with pytest.raises(ActuatorError, match=r"409.*at the same time"):
        await actuator.scale(2, ["worker-tiny-0.7"])
    assert set(kubernetes.costs()) == {"worker-tiny-0"}
    kubernetes.conflict = False
    await actuator.scale(2, ["worker-tiny-1.7", "worker-tiny-0.7"])
    assert set(kubernetes.pods) == {"worker-tiny-0", "worker-tiny-2"}
    assert kubernetes.costs() == {}


async def test_an_operators_own_costs_stay(kubernetes: Kubernetes, actuator: Actuator) -> None:
    await actuator.scale(3, [])
    kubernetes.pods["worker-tiny-0"]["metadata"]["annotations"]["controller.kubernetes.io/pod-deletion-cost"] = "-5"
    await actuator.scale(2, ["worker-tiny-1.7"])
    assert kubernetes.costs() == {"worker-tiny-0": "-5"}
    assert set(kubernetes.pods) == {"worker-tiny-0", "worker-tiny-2"}


async def test_fewer_pods_than_asked_say_why(kubernetes: Kubernetes, actuator: Actuator) -> None:
    kubernetes.room = 1
    await actuator.scale(3, [])
    actual = await actuator.actual()
    assert (actual.wanted, actual.up, actual.failures) == (3, 1, 0)
    assert "Unschedulable: 0/3 nodes: no gpu" in actual.failing


async def test_crash_loops_are_told_and_counted_since_the_pod_was_ready(
    kubernetes: Kubernetes, actuator: Actuator
) -> None:
    await actuator.scale(2, [])
    one = kubernetes.pods["worker-tiny-0"]
    one["status"]["containerStatuses"][0]["restartCount"] = 40  # over months
    assert (await actuator.actual()).failures == 0
    crash(one, 43)
    actual = await actuator.actual()
    assert (actual.up, actual.failures) == (1, 3)
    assert actual.failing == "pod worker-tiny-0: CrashLoopBackOff: m: it ended with 137 (OOMKilled)"
    other = opened(URL)
    assert (await other.actual()).failures == 1, "one that has just begun knows of one failed start"
    await other.aclose()


@pytest.mark.parametrize("state", ["pulling", "ending"])
async def test_pods_that_do_not_start_or_end_are_not_up(kubernetes: Kubernetes, actuator: Actuator, state: str) -> None:
    await actuator.scale(2, [])
    if state == "pulling":
        crash(kubernetes.pods["worker-tiny-0"], 0, "ImagePullBackOff")
    else:
        kubernetes.pods["worker-tiny-0"]["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    actual = await actuator.actual()
    assert (actual.up, actual.failures) == (1, int(state == "pulling"))
    assert ("ImagePullBackOff" in actual.failing) == (state == "pulling")


async def test_a_rotated_token_is_read_again(kubernetes: Kubernetes, actuator: Actuator) -> None:
    await actuator.scale(1, [])
    kubernetes.token = "two"
    kubernetes.token_file.write_text("two")
    assert (await actuator.actual()).up == 1
    kubernetes.token = "three"
    with pytest.raises(ActuatorError, match=r"401.*token"):
        await actuator.actual()


@pytest.mark.parametrize(
    ("right", "missing"),
    [
        ("get scale", "get on deployments/scale"),
        ("patch scale", "patch on deployments/scale"),
        ("list pods", "list on pods"),
        ("patch pods", "patch on pods"),
    ],
)
async def test_a_missing_right_is_named(kubernetes: Kubernetes, actuator: Actuator, right: str, missing: str) -> None:
    await actuator.scale(2, [])
    kubernetes.rights.remove(right)
    with pytest.raises(ActuatorError, match=f"403.*needs {missing}"):
        await actuator.scale(1, ["worker-tiny-0.7"])
    assert kubernetes.replicas == 2


async def test_an_hpa_of_the_same_deployment_is_refused_where_it_may_be_seen(
    kubernetes: Kubernetes, actuator: Actuator
) -> None:
    kubernetes.hpas = ["a-of-other", "keda-of-worker-tiny"]
    with pytest.raises(ActuatorError, match=r"keda-of-worker-tiny.*ScaledObject"):
        await actuator.scale(1, [])
    assert kubernetes.replicas == 0
    kubernetes.rights.remove("list hpas")
    await actuator.scale(1, [])
    assert kubernetes.replicas == 1


async def test_a_server_that_does_not_answer_is_given_up(
    kubernetes: Kubernetes, actuator: Actuator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(control, "CALL_S", 0.2)
    kubernetes.answering.clear()
    one = control.Acting(actuator, lambda: True, 60.0)
    await one._once()
    assert one.refused == "no answer for 0.2 s"
    kubernetes.answering.set()
    kubernetes.close()
    with pytest.raises(ActuatorError, match="cannot read the scale of deployment default/worker-tiny"):
        await actuator.actual()


async def test_another_deployment_is_not_found(kubernetes: Kubernetes) -> None:
    actuator = opened("kubernetes://default/worker-big?context=here")
    with pytest.raises(ActuatorError, match=r"404.*wrong namespace or name"):
        await actuator.actual()
    await actuator.aclose()


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("kubernetes://default", "must look like kubernetes://NAMESPACE/DEPLOYMENT"),
        ("kubernetes:///worker", "must look like"),
        (f"{URL}?contxt=a", "contxt=a makes no sense, it must look like"),
        ("kubernets://default/worker", "it must be one of export"),
    ],
)
def test_wrong_urls_are_refused(url: str, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        opened(url)


def test_no_way_to_a_cluster_is_told(kubernetes: Kubernetes, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="Context 'nowhere' not found"):
        opened(f"{URL}?context=nowhere")
    kubernetes.config.write_text("{}")
    with pytest.raises(ValueError, match=r"kubeconfig .* makes no sense"):
        opened(URL)
    monkeypatch.setenv("KUBECONFIG", str(kubernetes.config.parent / "none"))
    with pytest.raises(ValueError, match="KUBECONFIG"):
        opened(URL)
