"""Tasks that generate nothing have the promises of others: one entry each, whichever worker dies, and one end."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from producers import Client
from producers.contract.stream import rows_of
from producers.errors import TaskFailed
from tests.processes import Worker
from tests.stub_engine import DEADLY
from tests.workers.rig import Rig

TEXTS = [[5, 6, 7], [8], [9, 9]]
ROWS = [[5.0, 3.0], [8.0, 1.0], [9.0, 2.0]]


@pytest.fixture
def go(tmp_path: Path) -> Path:
    """A file without which no task ends."""
    return tmp_path / "go"


def embedder(rig: Rig, go: Path, *, lives: bool = True, **fields: Any) -> Worker:
    """A worker of an embedder. `lives`: it is waited for; one that its first task kills may never be seen up."""
    begin = rig.worker if lives else rig.begin_worker
    return begin(engine_factory="tests.stub_embedder:load", STUB_GO=str(go), **fields)


def submitted(rig: Rig, count: int, texts: Any = TEXTS, **task: Any) -> list[str]:
    with Client(rig.url, rig.store_url) as client:
        return [client.submit(kind="embed", model="stub", input=texts, **task).id for _ in range(count)]


def running(rig: Rig, ids: list[str]) -> None:
    rig.until(lambda: all(rig.status(task_id) == "in_progress" for task_id in ids))


def test_what_a_killed_worker_held_is_computed_again(rig: Rig, go: Path) -> None:
    first = embedder(rig, go)
    ids = submitted(rig, 5)
    running(rig, ids)
    assert [rig.tokens(task_id) for task_id in ids] == [0] * 5
    rig.kill(first)
    go.touch()
    embedder(rig, go)
    rig.until_settled(ids)
    for task_id in ids:
        (end,) = rig.entries(task_id)
        assert (end["end"], end["usage"]["prompt_tokens"], end["usage"]["output_tokens"]) == ("completed", 6, 0)
        assert [row.tolist() for row in rows_of(end["result"])] == ROWS
        assert (rig.record(task_id)["deaths"], rig.record(task_id)["claims"]) == ("1", "2")
    rig.check_nothing_left()


def test_a_drained_worker_hands_over_what_has_not_ended(rig: Rig, go: Path) -> None:
    first = embedder(rig, go, drain=0.1)
    ids = submitted(rig, 3)
    running(rig, ids)
    first.stop()
    go.touch()
    embedder(rig, go)
    rig.until_settled(ids)
    assert {(rig.status(task_id), rig.tokens(task_id)) for task_id in ids} == {("completed", 1)}
    assert {rig.record(task_id)["deaths"] for task_id in ids} == {"0"}


def test_a_text_that_kills_its_workers_is_given_up_alone(rig: Rig, go: Path) -> None:
    go.touch()
    rig.store.hset("penstock:models", "stub", _card())
    (deadly,) = submitted(rig, 1, [[5], [DEADLY]])
    for _ in range(2):
        worker = embedder(rig, go, lives=False, max_deaths=2)
        rig.until(lambda worker=worker: worker.process.poll() is not None)
        rig.lapse(worker)
    embedder(rig, go, max_deaths=2)
    (good,) = submitted(rig, 1)
    rig.until_settled([deadly, good])
    assert (rig.status(deadly), rig.status(good)) == ("failed", "completed")
    assert json.loads(rig.record(deadly)["error"])["code"] == "dead_lettered"
    assert "result" not in rig.entries(deadly)[0]


def test_a_cancelled_or_late_task_has_no_result(rig: Rig, go: Path) -> None:
    embedder(rig, go)
    (cancelled,), (late,) = submitted(rig, 1), submitted(rig, 1, timeout=1.0)
    running(rig, [cancelled])
    assert rig.cancel(cancelled)[0] == 1
    rig.until_settled([cancelled, late])
    go.touch()
    begun = "started" in rig.record(late)  # a busy machine may not have come to it in time
    assert (rig.status(cancelled), rig.status(late)) == ("cancelled", "incomplete" if begun else "failed")
    assert all("result" not in rig.entries(task_id)[0] for task_id in (cancelled, late))
    assert [rig.tokens(task_id) for task_id in (cancelled, late)] == [1, 1]
    with Client(rig.url, rig.store_url) as client, pytest.raises(TaskFailed, match="was cancelled"):
        client.get(cancelled).result(10)


def _card() -> str:
    from tests.stub_embedder import StubEmbedder

    engine = StubEmbedder()
    engine.close()
    card: str = engine.card.to_json()
    return card
