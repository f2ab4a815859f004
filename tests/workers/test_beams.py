"""Beam search through the system: whichever way it comes in, whatever computes it, and whatever ends it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from celery import Celery

from engine import Engine, EngineConfig, SamplingParams
from producers.contract import keys
from tests.producers.gateway.conftest import Door, open_door
from tests.waiting import PATIENCE_S, StepGate
from tests.workers.rig import rig as opened_rig
from tests.workers.test_adapters import PROMPT, TINY, adapter_of_tiny, add

__all__ = ["open_door"]

SEARCH: dict[str, Any] = {"max_tokens": 10, "beam_width": 4, "n": 2, "length_penalty": 0.5}
LONG: dict[str, Any] = {"max_tokens": 900, "beam_width": 16, "ignore_eos": True}
REAL: dict[str, Any] = {
    "model": "tiny",
    "engine_factory": "workers.runtime.worker:load_engine",
    "engine": {"threads": 1, "dtype": "float32", "max_num_seqs": 16, "kv_cache_bytes": 64 << 20},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return adapter_of_tiny(tmp_path_factory.mktemp("adapters") / "mine", 4)


@pytest.fixture(scope="module")
def expected(folder: Path) -> dict[str, list[str]]:
    """The engine's own outputs, by model."""
    with Engine.load(TINY, EngineConfig(**REAL["engine"])) as engine:
        engine.load_adapter("mine", folder)
        outputs = {name: engine.generate([PROMPT], SamplingParams(**SEARCH), name)[0] for name in ("", "mine")}
    texts = {name or "tiny": [choice.text for choice in output.choices] for name, output in outputs.items()}
    assert texts["tiny"] != texts["mine"]
    return texts


HOWS: dict[str, dict[str, Any]] = {
    "in the worker": {},
    "in a process of its own": {"engine_process": True},
    "on two ranks": {"tensor_parallel": 2},
    "in two stages": {"pipeline_parallel": 2},
}


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("how", HOWS)
def test_whatever_computes_it(
    how: str, folder: Path, expected: dict[str, list[str]], open_door: Callable[..., Door], tmp_path: Path
) -> None:
    """With an adapter and without, by HTTP and Celery; cancelled, out of time, and its worker killed."""
    more = HOWS[how]
    options = REAL | {"engine": REAL["engine"] | {k: v for k, v in more.items() if k != "engine_process"}}
    options |= {k: v for k, v in more.items() if k == "engine_process"}
    steps = StepGate(tmp_path)
    options |= steps.environment
    with opened_rig() as rig:
        worker = rig.begin_worker(**options)
        worker.wait_ready()
        add(rig, "mine", folder)
        door = open_door(broker=rig.url, store=rig.store_url)

        def submit(model: str = "tiny", **fields: Any) -> str:
            answer = httpx.post(
                f"{door.url}/v1/tasks", json={"model": model, "prompt": PROMPT, **fields}, timeout=PATIENCE_S
            )
            assert answer.status_code == 202, answer.text
            return str(answer.json()["id"])

        def result(task_id: str) -> dict[str, Any]:
            rig.until_settled([task_id])
            return dict(httpx.get(f"{door.url}/v1/tasks/{task_id}", timeout=PATIENCE_S).json())

        def texts(task_id: str) -> list[str]:
            return [choice["text"] for choice in result(task_id)["choices"]]

        ids = {model: submit(model, **SEARCH) for model in ("tiny", "mine", "tiny:mine")}
        assert {model: texts(ids[model]) for model in ("tiny", "mine")} == expected
        assert texts(ids["tiny:mine"]) == expected["mine"]
        app = Celery("sender", broker=rig.url, backend=rig.store_url, set_as_current=False)
        sent = app.send_task(keys.TASK_NAME, kwargs={"prompt": PROMPT, **SEARCH}, queue=keys.model_queue("tiny"))
        assert [choice["text"] for choice in sent.get(timeout=PATIENCE_S)["choices"]] == expected["tiny"]
        app.close()

        def generated() -> int:
            return int(rig.store.hget(keys.metrics("tiny"), "model_generated_tokens all n") or 0)

        rig.until(lambda: rig.leases()[0]["running"] == 0)
        before = generated()
        with steps.held(60):
            cancelled = submit("mine", **LONG)
            rig.until(lambda: generated() > before + 400)  # some of its beams are computed, and told of
            httpx.post(f"{door.url}/v1/tasks/{cancelled}/cancel", timeout=PATIENCE_S)
        late = submit("mine", **LONG, timeout=0.3)
        ended = result(cancelled)
        assert (ended["status"], rig.tokens(cancelled)) == ("cancelled", 1)
        assert ended["usage"]["output_tokens"] == int(rig.record(cancelled)["discarded"]) > 0
        assert ended["engine_seconds"] > 0
        ended = result(late)
        # A machine that is slow may not have begun it by then.
        assert (ended["status"] in ("incomplete", "failed"), ended["error"]["code"]) == (True, "expired")
        assert rig.tokens(late) == 1
        rig.until(lambda: rig.leases()[0]["running"] == 0)

        with steps.held():
            moved = submit("mine", **{**LONG, "max_tokens": 400})
            rig.until(lambda: rig.status(moved) == "in_progress")
            assert rig.tokens(moved) == 0
            rig.kill(worker)
        rig.begin_worker(**options).wait_ready()
        again = submit("mine", **{**LONG, "max_tokens": 400})
        assert texts(moved) == texts(again)
        assert [rig.record(each)["deaths"] for each in (moved, again)] == ["1", "0"]
        rig.check_nothing_left()
