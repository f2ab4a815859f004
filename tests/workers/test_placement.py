"""Tasks go to the worker that has the longest part of their prompt, and wait for it but a moment
(docs/how/placement.md)."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from engine.prefix import adapter_mark, prompt_marks
from engine.text.adapter import read_adapter
from producers.broker.redis import keys as broker_keys
from producers.contract import keys
from producers.contract.record import Record
from producers.store.fleet import adapters
from tests.engine.adapters.folders import write_adapter
from tests.workers.rig import TIMES, Rig

#: Two marks, in blocks of 16.
PROMPT = list(range(1, 129))
#: A machine that is busy may keep the holder from fetching for long.
LONG = TIMES | {"workers.flow.intake:LEFT_MS": 10**8}


def worker(rig: Rig, **fields: Any) -> Any:
    return rig.worker(placement="prefix", STUB_CACHE="1", **fields)


def runner_of(rig: Rig, prompt: list[int] | str, **task: Any) -> str:
    """The incarnation that has run a task."""
    (task_id,) = rig.submit(1, prompt=prompt, max_tokens=1, **task)
    rig.until_settled([task_id])
    *_, run = Record.parse(task_id, rig.record(task_id)).runs.values()
    return run.owner


def held_by(rig: Rig) -> set[str]:
    """Wait until both marks are known, of whichever prompts."""
    rig.until(lambda: rig.redis.hlen(broker_keys.PREFIXES) == 2)
    return set(rig.redis.hvals(broker_keys.PREFIXES))


def test_a_conversation_stays_with_its_worker(rig: Rig) -> None:
    for _ in range(2):
        worker(rig, times=LONG)
    first = runner_of(rig, PROMPT)
    assert held_by(rig) == {first}
    rig.until(lambda: rig.redis.hexists(broker_keys.held(first), "room"))
    assert {runner_of(rig, [*PROMPT, *range(500, 500 + turn)]) for turn in range(5)} == {first}
    rig.until(lambda: sum(lease["placed"] for lease in rig.leases()) == 5)
    assert sum(lease["unplaced"] for lease in rig.leases()) == 1


def test_who_hangs_is_waited_for_but_a_moment_and_who_died_not_at_all(rig: Rig) -> None:
    one, other = worker(rig), worker(rig)
    first = runner_of(rig, PROMPT)
    assert held_by(rig) == {first}
    holder = one if first.startswith(one.name) else other
    holder.suspend()
    second = runner_of(rig, PROMPT)
    assert second != first, "its lease stands, and another has taken the task"
    rig.kill(holder)
    rig.until(lambda: not rig.redis.exists(broker_keys.held(first)))
    rig.until(lambda: set(rig.redis.hvals(broker_keys.PREFIXES)) == {second})


def test_without_placement_nothing_is_said_of_prefixes(rig: Rig) -> None:
    rig.worker(STUB_CACHE="1")
    runner_of(rig, PROMPT)
    assert not rig.redis.keys(broker_keys.held("*")) + rig.redis.keys(broker_keys.PREFIXES)
    assert "placed" not in rig.leases()[0]


def test_a_task_goes_to_the_worker_that_has_its_adapter_loaded(rig: Rig, tmp_path: Path) -> None:
    """Whatever its prompt is, which may come as text."""
    files = read_adapter(write_adapter(tmp_path / "mine"))
    worker(rig, times=LONG, STUB_ADAPTERS=str(tmp_path))
    adapters.add(rig.store, "mine", "stub", files.version, files.rank, tmp_path / "mine")
    first = runner_of(rig, "text", model="mine")
    rig.until(lambda: rig.redis.hget(broker_keys.PREFIXES, adapter_mark(files.version, "v1")) == first)
    rig.until(lambda: rig.redis.hexists(broker_keys.held(first), "room"))
    worker(rig, times=LONG, STUB_ADAPTERS=str(tmp_path))
    assert {runner_of(rig, "other text", model="mine") for _ in range(4)} == {first}


@pytest.mark.exhaustive
@pytest.mark.timeout(600)  # 48 tasks one after another, each until what it left is known
def test_conversations_over_real_workers_find_what_one_worker_would_find(rig: Rig) -> None:
    """Of 12 conversations of four turns, at least nine tenths of the tokens before each turn's question."""
    for _ in range(3):
        worker(
            rig,
            times=LONG,
            model="tiny",
            engine_factory="workers.runtime.worker:load_engine",
            engine={"threads": 1, "kv_cache_bytes": 1 << 24},
        )
    rng, version = random.Random(5), json.loads(rig.store.hget(keys.MODELS, "tiny") or "")["version"]
    talks: list[list[int]] = [[rng.randrange(10, 200) for _ in range(70)] for _ in range(12)]
    cached = before = 0
    for turn in range(4):
        for talk in talks:
            known = len(talk) if turn else 0
            talk += [rng.randrange(10, 200) for _ in range(50)]
            (task_id,) = rig.submit(1, model="tiny", prompt=talk, max_tokens=6, ignore_eos=True, temperature=0.0)
            rig.until_settled([task_id])
            *_, run = Record.parse(task_id, rig.record(task_id)).runs.values()
            cached, before = cached + run.cached * bool(turn), before + known
            mark = prompt_marks(talk, 16, salt="", adapter="", version=version)[-1]
            rig.until(lambda mark=mark, owner=run.owner: rig.redis.hexists(broker_keys.held(owner), mark))
            talk += [entry[2] for entry in rig.entries(task_id) if isinstance(entry, list)]
    assert cached >= 0.9 * before, (cached, before)
