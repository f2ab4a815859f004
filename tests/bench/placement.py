"""What placement changes for conversations over several workers: `python -m tests.bench.placement`.

Simulated time, so a machine that is busy gives the same figures. The real parts: FETCH of the broker in memory, whose
every answer is compared with the scripts' (`tests/protocol`); the engine's scheduler, with its prefix cache and marks;
the submitter's marks. What is assumed: a step takes STEP_S and a time for each token that it computes; a call to the
broker arrives within CALL_S; a worker is woken by what arrives, by room, after `look_again`, and once a second.

Conversations begin at random times. All have one system prompt; each turn's prompt is the whole conversation so far.
`idle` and `busy` are loads, by how many conversations begin a second. `one` is a single worker with the cache and the
slots of all, as fast as all: what could be cached at best.
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import json
import random
import statistics
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

from engine.kv import Capacity, KvSpace
from engine.params import SamplingParams
from engine.plan import Sampled
from engine.prefix import prompt_marks
from engine.request import Request
from engine.scheduling.limits import ModelTraits
from engine.scheduling.scheduler import Scheduler
from producers.broker.memory.broker import MemoryConsumer, MemorySender
from producers.broker.memory.server import Server
from producers.broker.values import Ack, Credit, Rules
from producers.contract import keys
from producers.contract.message import Message

QUEUE: Final = keys.pool_queue("m", "1", "bench")
VERSION: Final = "v"
BLOCK: Final = 16
#: Of a worker: sequences, tokens of its cache, time (s) of a step and of each token that it computes.
SLOTS, CACHED, STEP_S, TOKEN_S = 8, 40_000, 0.02, 0.0005
#: A call's way (s), how often what is held is told, how often a worker looks for nothing.
CALL_S, TELL_S, LOOK_S = 0.0005, 0.5, 1.0
#: Tokens of the system prompt, of a question, of an answer; turns; time (s) from an answer to the next question.
SYSTEM, QUESTION, ANSWER, TURNS, THINK_S = 200, (30, 200), (20, 100), (3, 8), 4.0


@dataclass(slots=True)
class Conversation:
    number: int
    turns: int
    tokens: list[int]


@dataclass(slots=True)
class Turn:
    conversation: Conversation
    prompt: list[int]
    output: int
    sent: float
    made: list[int] = field(default_factory=list)


@dataclass(slots=True)
class Worker:
    name: str
    consumer: MemoryConsumer
    scheduler: Scheduler
    slots: int
    speed: float
    held: set[str] = field(default_factory=set)
    running: dict[str, tuple[str, Turn]] = field(default_factory=dict)
    """Task -> its delivery."""
    stepping: bool = False
    fetching: bool = False


@dataclass(slots=True)
class Trial:
    """One system, one load."""

    seed: int
    workers: int
    rate: float
    conversations: int
    places: bool
    faster: float = 1.0
    now: float = 0.0
    turns: dict[str, Turn] = field(default_factory=dict)
    waits: list[float] = field(default_factory=list)
    takes: list[float] = field(default_factory=list)
    prompt_tokens: int = 0
    cached_tokens: int = 0
    busy_s: float = 0.0
    rng: random.Random = field(init=False)
    sender: MemorySender = field(init=False)
    left: int = 0
    """Conversations that have not ended."""
    _events: list[tuple[float, int, Callable[[], None]]] = field(default_factory=list)
    _order: Any = field(default_factory=itertools.count)
    _names: Any = field(default_factory=itertools.count)
    _pool: list[Worker] = field(default_factory=list)

    def run(self) -> dict[str, Any]:
        self.rng = random.Random(self.seed)
        server = Server(clock=lambda: self.now * 1000)
        self.sender = MemorySender(server)
        slots, blocks = int(SLOTS * self.faster), int(CACHED * self.faster) // BLOCK
        for number in range(self.workers):
            capacity = Capacity((KvSpace(blocks),), BLOCK, slots, 512 * int(self.faster), 8192)
            scheduler = Scheduler(capacity, ModelTraits(VERSION))
            consumer = MemoryConsumer(server, [QUEUE])
            consumer.places = self.places
            worker = Worker(f"w{number}.1", consumer, scheduler, slots, self.faster)
            consumer.take_lease(worker.name, "{}", 1e9)
            self._pool.append(worker)
            self._at(self.rng.random() * TELL_S, lambda w=worker: self._tell(w))
            self._at(self.rng.random() * LOOK_S, lambda w=worker: self._look(w))
        at = 0.0
        for number in range(self.conversations):
            at += self.rng.expovariate(self.rate)
            tokens = list(range(SYSTEM))
            talk = Conversation(number, self.rng.randint(*TURNS), tokens)
            self._at(at, lambda talk=talk: self._ask(talk))
        self.left = self.conversations
        while self.left:
            self.now, _, act = heapq.heappop(self._events)
            act()
        return self.figures()

    def figures(self) -> dict[str, Any]:
        return {
            "cached_share": round(self.cached_tokens / self.prompt_tokens, 4),
            "wait_ms_p50": round(statistics.median(self.waits) * 1e3, 1),
            "wait_ms_p95": round(sorted(self.waits)[int(len(self.waits) * 0.95)] * 1e3, 1),
            "wait_ms_max": round(max(self.waits) * 1e3, 1),
            "task_s_p50": round(statistics.median(self.takes), 3),
            "task_s_p95": round(sorted(self.takes)[int(len(self.takes) * 0.95)], 3),
            "busy_share": round(self.busy_s / self.workers / self.now, 3),
            "tasks": len(self.waits),
        }

    def _at(self, delay: float, act: Callable[[], None]) -> None:
        heapq.heappush(self._events, (self.now + delay, next(self._order), act))

    # ---- callers --------------------------------------------------------------------------------------------------

    def _ask(self, talk: Conversation) -> None:
        talk.turns -= 1
        talk.tokens += [1000 + self.rng.randrange(30_000) for _ in range(self.rng.randint(*QUESTION))]
        task_id = f"t{next(self._names)}"
        turn = Turn(talk, list(talk.tokens), self.rng.randint(*ANSWER), self.now)
        self.turns[task_id] = turn
        marks = prompt_marks(turn.prompt, BLOCK, salt="", adapter="", version=VERSION) if self.places else []
        need = len(turn.prompt) + turn.output
        self.sender.send(Message(task_id, QUEUE, "default", 1, need, "", int(self.now * 1000), "", "".join(marks)))
        for worker in self._pool:
            self._wake(worker)

    def _ended(self, turn: Turn) -> None:
        self.takes.append(self.now - turn.sent)
        talk = turn.conversation
        talk.tokens += turn.made
        if talk.turns:
            self._at(self.rng.expovariate(1 / THINK_S), lambda: self._ask(talk))
        else:
            self.left -= 1

    # ---- workers --------------------------------------------------------------------------------------------------

    def _tell(self, worker: Worker) -> None:
        if self.places:
            marks = set(worker.scheduler.marks())
            worker.consumer.hold(worker.name, sorted(marks - worker.held), sorted(worker.held - marks))
            worker.held = marks
        self._at(TELL_S, lambda: self._tell(worker))

    def _look(self, worker: Worker) -> None:
        self._wake(worker)
        self._at(LOOK_S, lambda: self._look(worker))

    def _wake(self, worker: Worker, delay: float = 0.0) -> None:
        if delay or not worker.fetching:
            worker.fetching |= not delay
            self._at(delay + self.rng.random() * CALL_S, lambda: self._fetch(worker))

    def _fetch(self, worker: Worker) -> None:
        worker.fetching = False
        free = worker.slots - len(worker.running)
        held = sum(len(turn.prompt) + turn.output for _, turn in worker.running.values())
        tokens = worker.scheduler.stats().kv_blocks_total * BLOCK - held
        rules = Rules((worker.slots, tokens + held), 512, 30.0, 5)
        uuids = [f"u{next(self._names)}" for _ in range(32)]
        fetched = worker.consumer.fetch(worker.name, uuids, Credit((free,) * 4, (tokens,) * 4), rules) or []
        for one in fetched:
            task_id = json.loads(one.raw)["headers"]["id"]
            turn = self.turns[task_id]
            self.waits.append(self.now - turn.sent)
            worker.running[task_id] = one.uuid, turn
            params = SamplingParams(max_tokens=turn.output, ignore_eos=True)
            worker.scheduler.add(Request(task_id, turn.prompt, params, arrival=self.now))
        if fetched:
            self._wake(worker)
            self._step(worker)
        elif worker.consumer.look_again is not None:
            self._wake(worker, worker.consumer.look_again)

    def _step(self, worker: Worker) -> None:
        if worker.stepping or not worker.running:
            return
        plan = worker.scheduler.schedule(self.now)
        if plan is None:
            return
        worker.stepping = True
        took = STEP_S + TOKEN_S * plan.num_tokens / worker.speed
        self.busy_s += took
        self._at(took, lambda: self._stepped(worker, plan))

    def _stepped(self, worker: Worker, plan: Any) -> None:
        worker.stepping = False
        samples = [Sampled(1000 + self.rng.randrange(30_000)) for row in plan.rows if row.samples]
        for event in worker.scheduler.update(plan, samples, self.now):
            worker.running[event.request_id][1].made.extend(event.token_ids)
            if not event.done:
                continue
            uuid, turn = worker.running.pop(event.request_id)
            self.prompt_tokens += len(turn.prompt)
            self.cached_tokens += event.cached_tokens or 0
            worker.consumer.put_down([Ack(worker.name, uuid, used=len(turn.prompt) + turn.output)])
            self._ended(turn)
            self._wake(worker)
        self._step(worker)


def measure(load: str, rate: float, conversations: int, workers: int, seed: int) -> dict[str, Any]:
    def trial(count: int, *, places: bool, faster: float = 1.0) -> dict[str, Any]:
        return Trial(seed, count, rate, conversations, places, faster).run()

    one = trial(1, places=False, faster=workers)
    off, prefix = (trial(workers, places=places) for places in (False, True))
    return {
        "load": load,
        "one": one,
        "off": off,
        "prefix": prefix,
        "cached_of_one": {
            name: round(its["cached_share"] / one["cached_share"], 3)
            for name, its in (("off", off), ("prefix", prefix))
        },
        "wait_max_more_ms": round(prefix["wait_ms_max"] - off["wait_ms_max"], 1),
        "task_p95_ratio": round(prefix["task_s_p95"] / off["task_s_p95"], 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--conversations", type=int, default=200)
    parser.add_argument("--rates", type=float, nargs=2, default=[0.2, 3.0], help="conversations a second: idle, busy")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    for load, rate in zip(("idle", "busy"), args.rates, strict=True):
        print(json.dumps(measure(load, rate, args.conversations, args.workers, args.seed)), flush=True)


if __name__ == "__main__":
    main()
