"""What becomes of a task's copy for another version: the model's promises, that each of its rules is needed, and that
the scripts do what the model says, in random histories."""

from __future__ import annotations

import random
from typing import Any

import pytest
from redis import Redis

from producers.connection.script import Call, run, text
from producers.contract import keys
from producers.contract.record import FINAL
from producers.store import protocol, shadows
from tests.histories import seeds
from tests.producers.fake_worker import FakeWorker
from tests.protocol.model import shadow as model
from tests.protocol.model.shadow import World
from tests.protocol.server import Mutant

TASK, COPY = "t", shadows.copy_id("t")
FIELDS: dict[str, str | int] = {
    "task": "{}",
    "model": "m",
    "queue": "penstock:queue:m@a",
    "version": "a",
    "tier": "default",
    "n": 1,
    "tokens": 9,
}
ROW = shadows.Pair(TASK, "a", "b", ("completed",) * 2, (1, 1), 1.0, (("stop",),) * 2, (1, 1), (None, None))


def test_a_copy_is_compared_at_most_once_and_goes_whoever_dies() -> None:
    broken, states = model.check()
    assert not broken
    assert states > 150


@pytest.mark.parametrize("rule", model.RULES)
def test_every_rule_is_needed(rule: str) -> None:
    assert model.check(model.ALL - {rule})[0], model.RULES[rule]


class Scripts:
    """The model's steps at a real store. The copy's messages are the model's alone."""

    def __init__(self, store: Redis, mutant: Mutant | None) -> None:
        self.store, self.mutant, self.workers, self.calls = store, mutant, 0, 0

    def perform(self, label: str) -> None:
        """The call of a step."""
        match label:
            case "ADMIT of the task":
                assert self._admit(TASK, {"origin": "task", "shadow": "b"}) == "new"
            case "ADMIT of the copy":
                assert self._admit(COPY, {**shadows.COPY, "shadow_of": TASK}) == "new"
            case "ADMIT refuses the copy":
                assert self._admit(COPY, {**shadows.COPY, "shadow_of": TASK}) in ("exists", "erased")
            case "the task ends":
                self._worker().serve(TASK, ["x"])
            case "its time to live ends":
                self.store.delete(keys.task(TASK), keys.stream(TASK))
            case "takes the sample" | "takes the sample, reply lost" | "drops the sample":
                assert self.store.lpop(keys.SHADOW_SAMPLES) == TASK.encode()
            case "QUEUED of the copy" | "a sweeper sends what is unsent":
                self._run(protocol.queued(COPY))
            case "a worker: CLAIM":
                self.worker = self._worker()
                assert self.worker.claim(COPY).answer == "go"
            case "a worker: CLAIM finds nothing to do, ACK":
                assert self._worker().claim(COPY).answer == "done"
            case "FINISH of the copy" | "its deadline ends the copy":
                status = "completed" if label.startswith("FINISH") else "incomplete"
                assert self.worker.finish(COPY, [0], status=status)[0] == "won"
                self.worker.settle(COPY)
            case "its worker dies":
                self.worker.die()
            case "leaves out what is gone":
                self.store.zrem(keys.SHADOW_COPIES, COPY)
            case "PAIR" | "PAIR, reply lost" | "PAIR finds no copy":
                answer = self._run(shadows.pair("m", COPY, ROW))
                assert answer == (label != "PAIR finds no copy")
            case _ if label.startswith("DELETE"):
                name = TASK if label == "DELETE of the task" else COPY
                self.calls += 1
                assert text(self._run(protocol.delete(name, f"nonce{self.calls}"))[0]) != "gone"
            case _:
                assert label in ("sends the copy's message", "the sweeper is killed")

    def compare(self, w: World) -> None:
        """The store is as the model's world says."""
        task, copy = (self.store.hget(keys.task(name), "status") for name in (TASK, COPY))
        assert (text(task or b"") in FINAL, task is not None) == (w.task == "final", w.task in ("live", "final"))
        statuses = {"submitting": ("submitting",), "queued": ("queued", "in_progress"), "running": ("in_progress",)}
        if w.copy in ("", "gone"):
            assert copy is None
        else:
            assert text(copy or b"") in statuses.get(w.copy, FINAL)
        assert (self.store.zscore(keys.SHADOW_COPIES, COPY) is not None) == w.open
        assert self.store.llen(keys.SHADOW_SAMPLES) == w.sampled
        assert self.store.xlen(keys.shadow_pairs("m")) == w.rows
        assert self.store.hexists(keys.task(COPY), "paired") == (w.paired and w.copy != "gone")
        for index in (keys.TASKS, keys.REQUESTS):
            assert self.store.zscore(index, COPY) is None

    def _admit(self, name: str, more: dict[str, str | int]) -> str:
        self.calls += 1
        now = int(self.store.time()[0]) * 1000
        return text(self._run(protocol.admit(name, f"nonce{self.calls}", now, {**FIELDS, **more})))

    def _run(self, call: Call) -> Any:
        if self.mutant is not None:
            call = Call(self.mutant.broken(call.script), call.keys, call.args)
        return run(self.store, call)

    def _worker(self) -> FakeWorker:
        self.workers += 1
        return FakeWorker(self.store, f"w{self.workers}")


#: Steps after which little is left to do -> how often they are taken, by others.
ENDS = {"DELETE of the task": 0.3, "DELETE of the late": 0.1, "its time to live": 0.2, "drops": 0.05}


def check_scripts(store: Redis, mutant: Mutant | None = None) -> set[str]:
    """Random histories of the model, step by step at the store. Returns the steps that were taken."""
    labels = set[str]()
    for seed in seeds(150):
        store.flushall()
        draw, scripts, w = random.Random(seed), Scripts(store, mutant), World()
        for _ in range(20):
            steps = list(model.steps(w, model.ALL))
            if not steps:
                break
            weights = [next((n for end, n in ENDS.items() if label.startswith(end)), 1.0) for label, _, _ in steps]
            ((label, _, after),) = draw.choices(steps, weights)
            scripts.perform(label)
            scripts.compare(after)
            labels.add(label)
            w = after
    return labels


def test_the_scripts_do_what_the_model_says(valkey: Redis) -> None:
    assert len(check_scripts(valkey)) > 20, "most steps of the model were taken"


def test_nothing_is_paired_with_a_copy_that_is_gone(valkey: Redis) -> None:
    assert run(valkey, shadows.pair("m", COPY, ROW)) == 0
    assert not valkey.exists(keys.task(COPY), keys.shadow_pairs("m"))


@pytest.mark.parametrize(
    ("name", "old", "new"),
    [
        ("admit", "redis.call('EXISTS', 'penstock:task:' .. copied) == 0", "false"),
        ("admit", "redis.call('ZADD', 'penstock:shadows:open', now, id)", ""),
        ("admit", "if copied then\n", "if false then\n"),
        ("admit", "redis.call('RPUSH', 'penstock:shadows', id)", ""),
        ("delete", "  drop('penstock:task:' .. copy, copy)\n", ""),
        ("delete", "redis.call('ZREM', 'penstock:shadows:open', copy)", ""),
        ("delete", "redis.call('ZREM', 'penstock:shadows:open', id)", ""),
        ("pair", "redis.call('HSETNX', KEYS[1], 'paired', 1) == 1", "true"),
    ],
)
def test_a_broken_script_is_noticed(valkey: Redis, name: str, old: str, new: str) -> None:
    with pytest.raises(AssertionError):
        check_scripts(valkey, Mutant(protocol.PACKAGE, name, old, new))
