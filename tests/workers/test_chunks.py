"""A task of more texts than a worker takes at once: workers share its chunks, and whoever is killed loses nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from producers import Client
from producers.connection.script import run
from producers.contract import keys
from producers.errors import TaskFailed
from producers.store import chunks
from producers.store.chunks import chunk_id
from tests.stub_engine import DEADLY
from tests.workers.rig import Rig
from tests.workers.test_embed import _card, embedder

MANY = 10_000
TEXTS = [[number % 251 + 1] * (number % 3 + 1) for number in range(MANY)]
CHUNKS = 40
#: A token that keeps its chunk from ending.
HELD = 252


def submitted(rig: Rig, texts: Any = TEXTS, **task: Any) -> str:
    with Client(rig.url, rig.store_url) as client:
        return client.submit(kind="embed", model="stub", input=texts, **task).id


def statuses(rig: Rig, parent: str, count: int = CHUNKS) -> list[str | None]:
    return [rig.status(chunk_id(parent, number)) for number in range(count)]


@pytest.fixture
def go(tmp_path: Path) -> Path:
    """A file without which no task ends."""
    return tmp_path / "go"


def test_ten_thousand_texts_outlive_their_worker(rig: Rig, go: Path) -> None:
    """Of the chunks of a killed worker, those that it had not ended are computed again, and no others."""
    texts, held = list(TEXTS), [7, 30]
    for number in held:
        texts[256 * number + 3] = [HELD]
    first = embedder(rig, go, STUB_HUNG_BY=str(HELD))
    parent = submitted(rig, texts)
    rig.until(lambda: sorted(map(str, statuses(rig, parent))) == ["completed"] * 38 + ["in_progress"] * 2)
    assert rig.tokens(parent) == held[0]  # entries come in order
    rig.kill(first)
    go.touch()
    embedder(rig, go)
    embedder(rig, go)
    rig.until(lambda: rig.status(parent) == "completed")
    with Client(rig.url, rig.store_url) as client:
        result = client.get(parent).result()
    assert [row.tolist() for row in result.rows or ()] == [[float(text[0]), float(len(text))] for text in texts]
    assert result.usage["prompt_tokens"] == sum(map(len, texts))
    claims = {number: rig.record(chunk_id(parent, number))["claims"] for number in range(CHUNKS)}
    assert claims == {number: "2" if number in held else "1" for number in range(CHUNKS)}
    *entries, end = rig.entries(parent)
    assert [(entry["chunk"], entry["offset"]) for entry in entries] == [(n, 256 * n) for n in range(CHUNKS)]
    assert end["end"] == "completed"
    rig.until_settled([chunk_id(parent, number) for number in range(CHUNKS)])


def test_a_text_that_kills_its_workers_is_named_by_its_chunk(rig: Rig, go: Path) -> None:
    go.touch()
    rig.store.hset(keys.MODELS, "stub", _card())
    parent = submitted(rig, [[5]] * 300 + [[DEADLY]])
    for _ in range(2):
        worker = embedder(rig, go, lives=False, max_deaths=2)
        rig.until(lambda worker=worker: worker.process.poll() is not None)
        rig.lapse(worker)
    embedder(rig, go, max_deaths=2)
    rig.until(lambda: rig.status(parent) == "failed")
    given_up = r"^input\[256\] to input\[300\]: Given up"
    with Client(rig.url, rig.store_url) as client, pytest.raises(TaskFailed, match=given_up):
        client.get(parent).result()
    assert rig.status(chunk_id(parent, 0)) == "completed"


def test_a_cancel_ends_the_task_and_all_of_its_chunks(rig: Rig, go: Path) -> None:
    """Those that wait, and those that a worker has."""
    embedder(rig, go, STUB_SEQS="4")
    events = ["response.in_progress", "response.cancelled"]
    parent = submitted(rig, webhook={"url": "http://127.0.0.1:9/hook", "events": events})
    rig.until(lambda: statuses(rig, parent).count("in_progress") == 4)
    assert rig.cancel(parent) == [1, "cancelled"]
    while run(rig.store, chunks.advance(parent))[1]:
        pass  # as the sweeper does
    rig.until(lambda: set(statuses(rig, parent)) == {"cancelled"})
    assert rig.cancel(parent) == [0, "cancelled"]
    (end,) = rig.entries(parent)
    begun = sum(map(len, TEXTS[: 4 * 256]))  # what workers began is what it used
    assert (end["end"], end["usage"]["prompt_tokens"]) == ("cancelled", begun)
    rows = rig.record(parent)["rows"].split()
    assert [rig.store.hget(f"penstock:webhooks:row:{row}", "type") for row in rows] == events
    rig.until_settled([chunk_id(parent, number) for number in range(CHUNKS)])
    assert not rig.store.exists(keys.PARENTS)


def test_a_worker_ends_a_chunk_whose_parent_has_ended(rig: Rig, go: Path) -> None:
    rig.store.hset(keys.MODELS, "stub", _card())
    parent = submitted(rig, [[5]] * 300)
    assert rig.cancel(parent) == [1, "cancelled"]
    embedder(rig, go)  # nothing ends, and no sweeper is there
    rig.until_settled([chunk_id(parent, number) for number in range(2)])
    assert statuses(rig, parent, 2) == ["cancelled"] * 2
    assert not any("started" in rig.record(chunk_id(parent, number)) for number in range(2))
