"""Scripts of two releases on one store do together what the model says: each process sends its own text of them.

The machines are those of `tests.protocol`, with a release for whoever acts: each worker has one, gateways and sweepers
are of either by turns. The pairs are the release before with this one, and this one with a next, which has the same
scripts and a higher level: its tasks may need that.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition, rule
from redis import Redis

from producers import Client
from producers.broker.memory.server import Server as Memory
from producers.broker.redis import calls as broker
from producers.broker.redis import keys as broker_keys
from producers.connection.script import Script, run, script, text
from producers.contract import keys, levels
from producers.store import chunks, protocol
from producers.sweeper import queues
from tests.exhaustive import few, one_of_each
from tests.histories import examples
from tests.producers.conftest import CARD
from tests.producers.fake_worker import FakeWorker
from tests.protocol import broker as broker_pair
from tests.protocol import broker_histories, store, store_histories, test_broker, test_prompt_script, test_unread_script
from tests.protocol import test_scripts as test_store
from tests.protocol.model import ALL, scripts
from tests.protocol.server import THIS, Mutant, Release, notices, run_machine, written
from tests.releases.before import Before, Functions

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@dataclass(frozen=True, slots=True)
class Earlier(Release):
    """The release before."""

    process: Before | None = None

    def of(self, module: ModuleType) -> Any:
        assert self.process
        return Functions(self.process, module)


class _Raised:
    """A module's functions, as a release with a higher level has them."""

    def __init__(self, module: ModuleType, level: int) -> None:
        self._module, self._level = module, level

    def __getattr__(self, name: str) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            with mock.patch.object(levels, "LEVEL", self._level):
                return getattr(self._module, name)(*args, **kwargs)

        return call


@dataclass(frozen=True, slots=True)
class Later(Release):
    """A release after this one."""

    def of(self, module: ModuleType) -> Any:
        return _Raised(module, self.level)


NEXT = Later(levels.LEVEL + 1)


@dataclass(frozen=True, slots=True)
class Mix:
    """Who is of which release; True: of the later one. `later`: the pair is this release and the next. `workers`: each
    one's; `others`: that of gateways and sweepers, by turns."""

    workers: tuple[bool, ...]
    others: tuple[bool, ...]
    later: bool = False


mixes = st.builds(
    Mix,
    st.tuples(*[st.booleans()] * 3),
    st.lists(st.booleans(), min_size=3, max_size=20).map(tuple),
    st.booleans(),
)
of_the_pair_before = mixes.map(lambda mix: Mix(mix.workers, mix.others))


class Mixed:
    """A machine in which who acts is of the release that `mix` says."""

    mix: Mix
    earlier: Release
    turn = 0

    def acts(self, who: str = "") -> Release:
        if who in store.INCS:
            later = self.mix.workers[store.INCS.index(who)]
        else:
            self.turn += 1
            later = self.mix.others[self.turn % len(self.mix.others)]
        return self.pair[later]

    @property
    def pair(self) -> tuple[Release, Release]:
        return (THIS, NEXT) if self.mix.later else (self.earlier, THIS)


class MixedStore(Mixed, test_store.StoreMachine):
    @initialize(**test_store.BEGIN, mix=mixes)
    def begin(self, mix: Mix | None = None, **drawn: Any) -> None:
        self.mix = mix or self.mix
        super().begin(**drawn)

    def need(self, t: str, release: Release) -> int:
        """Of `t1` the later release's caller asks for something new."""
        return release.level if t == "t1" and release.level > self.pair[0].level else 0

    @rule(aged=st.booleans(), listed=st.booleans())
    @precondition(lambda self: self.mix.later and self.model["t1"])
    def unserved(self, aged: bool, listed: bool) -> None:
        """`listed`: the broker lists the worker of a pool that has no queue of its own, too."""
        error = json.dumps({"code": "release_missing", "message": ""})
        workers = [inc for inc in store.INCS if listed and store.POOLS[store.INCS.index(inc)].version == "1"]
        after_s = 0.0 if aged else 3600.0
        call = self.acts().of(queues).unserved("t1", error, store.POOL.version_queue, after_s, workers)

        def step() -> None:
            answer = text(self.server.run(call))
            expected, self.model["t1"] = scripts.unserved(
                self.model["t1"], self.live, store.POOL.version, self.serving(), ALL, aged=aged
            )
            assert answer == expected

        self.do(step)


class Leveled(Memory):
    """A broker in memory that counts as alive, for a queue beside another, whose release can do what its tasks need."""

    level: Callable[[str], int]
    need = 0

    def recall(self, queue: str, takers: Any, count: int) -> int:
        self.need = levels.split(queue)[1]
        return super().recall(queue, takers, count)

    def adopt(self, source: str, target: str) -> int:
        self.need = levels.split(source)[1]
        return super().adopt(source, target)

    def _any_lives(self, takers: Any) -> bool:
        return any(p in takers and self.lives(inc) and self.level(inc) >= self.need for inc, p in self.listed.items())


class MixedBroker(Mixed, test_broker.BrokerMachine):
    #: Beside the versions' queues, for what only the next release can do.
    BESIDE = (levels.queue_of("penstock:m@1", NEXT.level), levels.queue_of("penstock:m@2", NEXT.level))

    @initialize(**test_broker.BEGIN, mix=mixes)
    def begin(self, mix: Mix, **drawn: Any) -> None:
        self.mix = mix
        super().begin(**drawn)

    @property
    def all_place(self) -> bool:
        """REAP of the release before removes nothing of what is held; HOLDS does by and by."""
        return self.mix.later

    def open(self) -> None:
        self.queues = (*broker_pair.QUEUES, *self.BESIDE) if self.mix.later else tuple(broker_pair.QUEUES)
        super().open()

    def memory(self) -> Memory:
        model = Leveled(lambda queue: broker.lists([queue]))
        model.level = lambda inc: self.acts(inc).level
        return model

    def reads(self, inc: str) -> list[str]:
        return [*broker_pair.QUEUES, *(self.BESIDE if self.acts(inc) is NEXT else ())]

    @rule(queue=st.sampled_from(BESIDE), tier=st.sampled_from(sorted(keys.TIERS)), batch=test_broker.batches)
    @precondition(lambda self: self.mix.later)
    def send_what_needs_the_next(self, queue: str, tier: str, batch: list[bytes]) -> None:
        self.send(broker_keys.tier_lists(queue, tier)[0], batch)

    @rule(inc=test_broker.incs)
    @precondition(lambda self: self.mix.later)
    def dies_for_good(self, inc: str) -> None:
        self.lapses(inc)
        self.reap(inc)

    @rule(adopt=st.booleans(), count=st.sampled_from([1, 100]))
    @precondition(lambda self: self.mix.later)
    def sweep_what_needs_the_next(self, adopt: bool, count: int) -> None:
        """By a sweeper of the next release: one before it knows of no such queue."""
        source, target = self.BESIDE
        said, takers = NEXT.of(broker), [broker_pair.QUEUES[1]]
        if adopt and not any(self.model.delayed.values()):
            call = said.adopt(source, target)
            self.do(lambda: self._agree(call, lambda: self.model.adopt(source, target)))
        else:
            call = said.recall(source, takers, count)
            self.do(lambda: self._agree(call, lambda: self.model.recall(source, takers, count)))


class MixedPrompt(Mixed, test_prompt_script.PromptMachine):
    @initialize(mix=of_the_pair_before)
    def begin(self, mix: Mix) -> None:
        self.mix = mix
        super().begin()


class MixedUnread(Mixed, test_unread_script.UnreadMachine):
    @initialize(mix=of_the_pair_before, **test_unread_script.BEGIN)
    def begin(self, mix: Mix, **drawn: Any) -> None:
        self.mix = mix
        super().begin(**drawn)


#: Mixes for histories that are too long for luck: workers and sweepers of one release each; all by turns.
MIXES = {
    "workers first": Mix((True, True, True), (False,)),
    "workers last": Mix((False, False, False), (True,)),
    "half of each": Mix((False, True, False), (True, False)),
    "the other half": Mix((True, False, True), (False, True)),
    "rarely": Mix((True, True, False), (True, True, False)),
    "mostly": Mix((False, False, True), (False, False, True)),
    "all before": Mix((False, False, False), (False,)),
}


@pytest.fixture(scope="module")
def earlier(before: Path) -> Iterator[Earlier]:
    process = Before(before)
    # 0.1.0 does none of it
    yield Earlier(
        levels.SHARED,
        minds_memory=False,
        counts_joins=False,
        minds_revoked=False,
        places=False,
        counts_cuts=False,
        process=process,
    )
    process.close()


def machine(kind: type[Any], redis: Redis, earlier: Release, mutant: Any = None, **more: Any) -> Any:
    return type("Machine", (kind,), {"redis": redis, "mutant": mutant, "earlier": earlier, **more})


# ---- histories ------------------------------------------------------------------------------------------------------


def go_through_long_histories(redis: Redis, earlier: Release, mix: Mix, mutant: Any = None) -> None:
    for history in store_histories.HISTORIES:
        history(machine(MixedStore, redis, earlier, mutant, mix=mix))


def leave_a_task_to_the_next_release(redis: Redis, earlier: Release, mutant: Any = None) -> None:
    """Whatever happens to what needs it, a worker of this release changes nothing of it."""
    mix = Mix((True, False, True), (True,), later=True)
    at = machine(MixedStore, redis, earlier, mutant, mix=mix)()
    at.begin(begun=(0, 0, 0), alive=(True, True, False))
    at.admit("t1", "mine", False)
    own, other = store.POOLS[:2]
    for step in (
        lambda: None,
        lambda: at.claim("t1", "i1", False, False, False, own),
        lambda: at.release("t1", True),
        lambda: at.claim("t1", "i1", False, False, False, other),
        lambda: at.append([("t1", True, True, 0, 0, 2)]),
        lambda: at.release("t1", True),
        lambda: at.claim("t1", "i1", False, False, False, own),  # no worker of its pool can do it
        lambda: at.lease("i1", False),
    ):
        step()
        before = at.model["t1"]
        assert before
        assert before.need == NEXT.level
        for pool in (own, other):
            at.claim("t1", "i2", False, False, False, pool)
        assert at.model["t1"] == before
    at.lease("i1", True)
    at.claim("t1", "i1", False, False, False)
    at.finish("t1", True, "completed", 9)
    at.settle("t1")
    at.compact("t1", True, False)
    at.teardown()


def end_what_nobody_can_do(redis: Redis, earlier: Release, mutant: Any = None) -> None:
    """A task that waits, and one that was begun: once no worker that can do it is left, others are, and it is old."""
    mix = Mix((True, False, True), (True,), later=True)
    for begun in (False, True):
        at = machine(MixedStore, redis, earlier, mutant, mix=mix)()
        at.begin(begun=(0, 0, 0), alive=(False, True, True))
        at.admit("t1", "mine", False)
        at.unserved(True, True)
        at.queued("t1", True)
        if begun:
            at.claim("t1", "i3", False, False, False)  # which drains: none of the version's others can do it
            at.append([("t1", True, True, 0, 0, 1)])
            at.unserved(True, True)
            at.lease("i3", False)
        for changes, aged in (
            ({"i1": True}, True),
            ({"i1": False, "i2": False}, True),
            ({"i2": True}, False),
            ({}, True),
        ):
            assert not at.model["t1"].end
            for inc, lives in changes.items():
                at.lease(inc, lives)
            at.unserved(aged, True)
        assert at.model["t1"].end == ("incomplete" if begun else "failed")
        at.unserved(True, True)
        at.orphan("t1", False)
        at.teardown()


def leave_messages_to_the_next_release(redis: Redis, earlier: Release, mutant: Any = None) -> None:
    """Workers of this release neither take them nor keep them from a sweeper of the next."""
    mix = Mix((True, False, True), (True,), later=True)
    at = machine(MixedBroker, redis, earlier, mutant, mix=mix)()
    at.open()
    next_one, this_one = broker_pair.INCS
    try:
        for adopt in (False, True):
            at.lease(next_one, True, broker_pair.QUEUES[1])
            at.send_what_needs_the_next(at.BESIDE[0], "default", [test_broker.STEADY] * 3)
            at.fetch_more(this_one, 2)
            assert not at.model.inflight[this_one]
            at.fetch_more(next_one, 2)
            at.sweep_what_needs_the_next(adopt, 100)
            at.dies_for_good(next_one)
            at.sweep_what_needs_the_next(adopt, 100)
    finally:
        at.teardown()


@pytest.mark.parametrize("mix", few(MIXES, "half of each"))
def test_long_histories_of_tasks(mix: str, valkey: Redis, earlier: Earlier) -> None:
    go_through_long_histories(valkey, earlier, MIXES[mix])


@pytest.mark.parametrize("mix", few(MIXES, "half of each"))
def test_long_histories_of_messages(mix: str, valkey: Redis, earlier: Earlier) -> None:
    broker_histories.run_histories(machine(MixedBroker, valkey, earlier, mix=MIXES[mix]))


def test_what_needs_the_next_release_is_left_to_it(valkey: Redis, earlier: Earlier) -> None:
    leave_a_task_to_the_next_release(valkey, earlier)
    leave_messages_to_the_next_release(valkey, earlier)
    end_what_nobody_can_do(valkey, earlier)


def test_a_task_in_chunks_ends_whatever_the_release_before_did_to_it(
    valkey: Redis, valkey_url: str, earlier: Earlier
) -> None:
    """Its sweeper ended a chunk, its gateway cancelled or deleted the task: its scripts know no chunks."""
    embedder = {**CARD, "capabilities": ["embed"], "pooling": {"dimensions": 2}}
    valkey.hset(keys.MODELS, "tiny", json.dumps(embedder))
    old = earlier.of(protocol)
    with Client(valkey_url) as client:
        late, cancelled, deleted = [client.submit(kind="embed", model="tiny", input=["x"] * 300).id for _ in range(3)]
    chunk = chunks.chunk_id(late, 1)
    valkey.hset(keys.task(chunk), "deadline", 1)
    assert run(valkey, old.expire(chunk)) == b"failed"
    assert valkey.hget(keys.task(late), "status") == b"queued"
    assert run(valkey, chunks.advance(late)) == [b"queued", 1]  # chunk 0 goes on before it
    worker = FakeWorker(valkey)
    worker.claim(chunks.chunk_id(late, 0))
    worker.finish(chunks.chunk_id(late, 0), [0])
    assert run(valkey, chunks.advance(late)) == [b"failed", 0]
    assert run(valkey, old.cancel(cancelled)) == [1, b"cancelled"]
    assert run(valkey, old.delete(deleted, "n")) == [b"queued"]
    for parent in (cancelled, deleted):
        assert worker.claim(chunks.chunk_id(parent, 0)).answer == "settle"
        assert valkey.hget(keys.task(chunks.chunk_id(parent, 0)), "status") == b"cancelled"
    assert run(valkey, chunks.advance(cancelled)) == [b"cancelled", 0]
    assert run(valkey, chunks.advance(deleted)) == [b"gone", 0]
    assert valkey.zcard(keys.PARENTS) == 0


#: Machine -> examples in `make test` and in the exhaustive run, and steps of each.
MACHINES: dict[type[Any], tuple[int, int, int]] = {
    MixedStore: (10, 60, 40),
    MixedBroker: (10, 60, 40),
    MixedPrompt: (4, 40, 25),
    MixedUnread: (4, 25, 10),
}


@pytest.mark.parametrize("kind", MACHINES)
def test_two_releases_and_the_model_agree(kind: type[Any], valkey: Redis, earlier: Earlier) -> None:
    little, much, steps = MACHINES[kind]
    run_machine(machine(kind, valkey, earlier), examples(little, much), steps)


# ---- broken on purpose ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Format:
    """Another way to write something, in all of this release's scripts that write or read it."""

    changes: tuple[tuple[str, str], ...]

    def broken(self, sent: Script) -> Script:
        if not any(sent is script(protocol.PACKAGE, name) for name in WRITERS):
            return sent
        whole = sent.text
        for old, new in self.changes:
            whole = whole.replace(old, new)
        return written(whole)


#: Scripts that write rows' names into a record, and the one that reads them.
WRITERS = ("cancel", "claim", "expire", "finish", "delete")
ROWS = Format((("before .. ' '", "before .. ','"), ("concat(names, ' ')", "concat(names, ',')"), ("'%S+'", "'[^,]+'")))


def test_a_format_that_the_release_before_misreads_is_noticed(valkey: Redis, earlier: Earlier) -> None:
    """One release alone does not notice it, since its scripts agree. Of two, DELETE leaves what the other wrote."""
    assert all(ROWS.broken(one) != one for one in (script(protocol.PACKAGE, name) for name in WRITERS))
    store_histories.be_deleted(type("Machine", (test_store.StoreMachine,), {"redis": valkey, "mutant": ROWS}))
    with pytest.raises(AssertionError):
        store_histories.be_deleted(machine(MixedStore, valkey, earlier, ROWS, mix=MIXES["half of each"]))


#: Scripts that do not keep releases apart.
MUTANTS = {
    "CLAIM compares no levels": ("claim", "return need > level and beside(queue, need)", "return false"),
    "CLAIM names the queue that all read": ("claim", "'queue', beside(queue, need)", "'queue', queue"),
    "CLAIM waits for a pool whose workers cannot do it": ("claim", "lives({ pool }, need)", "lives({ pool }, 0)"),
    "UNSERVED ends what is new": ("unserved", "or now_ms() - tonumber(r[5] or '0') < tonumber(ARGV[4])\n", ""),
    "UNSERVED ends what runs": ("unserved", "'penstock:lease:' .. owner) == 1", "'penstock:lease:' .. owner) == 2"),
    "UNSERVED ends what is still submitting": ("unserved", "(status == 'queued' or", "(status ~= '' or"),
    "UNSERVED asks for no level": ("unserved", "if lives_at(worker, level) then", "if false then"),
    "UNSERVED ends what waits for any worker": ("unserved", "if not lives then", "if false then"),
    "UNSERVED fails what was begun": ("unserved", "id, r[4], ARGV[2]", "id, false, ARGV[2]"),
    "UNSERVED leaves the dead owner's claim": ("unserved", "redis.call('HDEL', task, 'claim', 'owner')\n", ""),
    "UNSERVED speaks of a deadline": ("unserved", "r[4], ARGV[2], '\"error\"')", "r[4])"),
    "RECALL is held up by who cannot do it": ("recall", "lives_at(listed[k], level)", "lives_at(listed[k], 0)"),
    "ADOPT is held up by who cannot do it": ("adopt", "lives_at(listed[k], level)", "lives_at(listed[k], 0)"),
}


def leave_to_the_next_release(redis: Redis, mutant: Mutant, earlier: Earlier) -> None:
    leave_a_task_to_the_next_release(redis, earlier, mutant)
    leave_messages_to_the_next_release(redis, earlier, mutant)
    end_what_nobody_can_do(redis, earlier, mutant)


@pytest.mark.parametrize("broken", one_of_each(itemgetter(0), MUTANTS))
def test_a_script_that_does_not_keep_releases_apart_is_noticed(broken: str, valkey: Redis, earlier: Earlier) -> None:
    package = protocol.PACKAGE if MUTANTS[broken][0] in ("claim", "unserved") else broker.PACKAGE
    notices(leave_to_the_next_release, valkey, Mutant(package, *MUTANTS[broken]), earlier=earlier)
