"""Fuzzed messages into every list that a worker reads, among tasks that must come out right.

    python -m tests.fuzz.on_queue --messages 10000 --engine stub

A real worker process serves them. Every message has to end: as a dead letter with the very bytes that were sent, in a
final record, with a result in Celery's backend, or, where a client sent it and its record is gone, in nothing. What is
told to wait for an ETA far away may go on waiting. The worker has to live, and to hold nothing afterwards. Prints a
report as JSON; exits with 1 where anything of that does not hold.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from redis import Redis

from producers.broker.redis import keys as broker_keys
from producers.broker.redis.calls import lists
from producers.contract import keys
from tests.fuzz.drawing import drawn
from tests.fuzz.ends import Ends, sent_id
from tests.fuzz.messages import Fuzzed, messages
from tests.fuzz.watch import Held, held
from tests.processes import Worker, fill, queues_of, running_valkey
from tests.waiting import PATIENCE_S
from workers.trials.chaos.checker.rest import at_rest, held_by

ENGINES: dict[str, dict[str, Any]] = {
    "bundled": {
        "model": "tiny",
        "engine_factory": "workers.runtime.worker:load_engine",
        "engine": {"dtype": "float32", "threads": 1, "max_num_seqs": 32, "kv_cache_bytes": 64 << 20},
    },
    "stub": {"model": "stub", "STUB_SEQS": "32"},
}
BATCH = 50
#: Tasks among each batch that have to come out right.
VALID = 5
#: Part of the messages after which what the worker holds is what it usually holds.
WARM = 0.3
#: Files and threads that may come and go with connections: as many as threads may have one at a time.
LOOSE = 12


@dataclass(slots=True)
class Findings:
    engine: str
    seed: int
    sent: int = 0
    valid: int = 0
    seconds: float = 0.0
    kinds: Counter[str] = field(default_factory=Counter)
    ends: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)
    before: Held | None = None
    after: Held | None = None

    def report(self) -> dict[str, Any]:
        return {
            "engine": self.engine,
            "seed": self.seed,
            "sent": self.sent,
            "good_tasks": self.valid,
            "seconds": self.seconds,
            "kinds": dict(self.kinds.most_common()),
            "ends": dict(self.ends.most_common()),
            "before": self.before and asdict(self.before),
            "after": self.after and asdict(self.after),
            "faults": self.faults,
        }


class Line:
    """A server with one worker on it. `queue` is its pool's, `lists` all that it reads."""

    def __init__(self, url: str, engine: str) -> None:
        self.redis = Redis.from_url(url)
        self.text = Redis.from_url(url, decode_responses=True)
        settings = ENGINES[engine]
        self.model: str = settings["model"]
        self.worker = Worker(url, **settings, lease=10.0, retry_after=0.05, LOG_LEVEL="WARNING")
        self.worker.wait_ready()
        queues = queues_of(self.redis, self.model)
        self.queue = queues[1]
        self.lists = [name for name, _ in lists(queues)]
        self._serial = 0
        self._right = [self._tokens(task) for task in self._run(range(VALID))]

    def feed(self, batch: Sequence[Fuzzed], findings: Findings) -> None:
        """Send them among good tasks, wait for the end of all, and say what was wrong."""
        sent: list[tuple[str, Fuzzed]] = []
        for fuzzed in batch:
            self._serial += 1
            named = fuzzed.named(f"fuzz-{self._serial}")
            sent.append((sent_id(named.raw) or f"fuzz-{self._serial}", named))
        pipe = self.redis.pipeline(transaction=False)
        for number, (task_id, fuzzed) in enumerate(sent):
            if number % (len(sent) // VALID or 1) == 0:
                pipe.execute()
            self._put(pipe, task_id, fuzzed)
        pipe.execute()
        good = fill(self.text, self.queue, VALID, **self._task())
        ends = Ends(self.redis, self.lists)
        if not self._quiet(ends):
            findings.faults.append(
                f"stuck: {ends.left()}\nthe worker ({self.worker.process.poll()}) says:\n{self._said()}"
            )
            return
        kinds = ends.of(sent)
        findings.sent += len(sent)
        findings.kinds.update(fuzzed.kind for fuzzed in batch)
        findings.ends.update(end for end, _ in kinds)
        for (end, why), (task_id, fuzzed) in zip(kinds, sent, strict=True):
            if why:
                findings.faults.append(f"{fuzzed.kind} {task_id}: {end}: {why}: {fuzzed!r:.6000}")
        findings.valid += VALID
        for right, task_id in zip(self._right, good, strict=True):
            if (made := self._tokens(task_id)) != right:
                findings.faults.append(f"a good task came out wrong: {made}, not {right}")

    def idle(self) -> Held:
        """What the worker holds when it has nothing to do; raises AssertionError where that is anything of a task."""
        assert not list(filter(held_by, at_rest(self.text)))
        assert not self.redis.keys(broker_keys.inflight("*")), (
            "messages are in flight, and nobody says that he has them"
        )
        return held(self.worker.process.pid)

    def close(self) -> None:
        """Drain it; one that does not end is killed, and its log kept."""
        try:
            self.worker.stop()
        except subprocess.TimeoutExpired:
            self.worker.process.kill()
        else:
            self.worker.log.unlink()
        self.redis.close()
        self.text.close()

    def _said(self) -> str:
        return self.worker.log.read_text()[-6000:]

    def _put(self, pipe: Any, task_id: str, fuzzed: Fuzzed) -> None:
        if fuzzed.record is not None:
            pipe.hset(keys.task(task_id), mapping=fuzzed.record)
        for place, entry in enumerate(fuzzed.stream):
            pipe.xadd(keys.stream(task_id), {"e": entry}, id=f"{place + 1}-0")
        if fuzzed.in_the_way is not None:
            pipe.set(keys.task(task_id), fuzzed.in_the_way)
        pipe.lpush(self.lists[fuzzed.place % len(self.lists)], fuzzed.raw)

    def _quiet(self, ends: Ends) -> bool:
        deadline = time.monotonic() + PATIENCE_S
        while not ends.quiet():
            if time.monotonic() > deadline or self.worker.process.poll() is not None:
                return False
            time.sleep(0.02)
        return True

    def _task(self) -> dict[str, Any]:
        return {"model": self.model, "temperature": 0.0, "max_tokens": 8}

    def _run(self, seeds: range) -> list[str]:
        ids = fill(self.text, self.queue, len(seeds), **self._task())
        self.worker.wait_until(lambda: all(self.text.hexists(keys.task(task_id), "settled") for task_id in ids))
        return ids

    def _tokens(self, task_id: str) -> tuple[str, list[Any]]:
        entries = [json.loads(fields["e"]) for _, fields in self.text.xrange(keys.stream(task_id))]
        tokens = [entry[2] for entry in entries if isinstance(entry, list)]
        return str(self.text.hget(keys.task(task_id), "status")), tokens


@contextlib.contextmanager
def line(engine: str) -> Iterator[Line]:
    with running_valkey() as server:
        made = Line(f"redis://127.0.0.1:{server.port}/0", engine)
        try:
            yield made
        finally:
            made.close()


def run(count: int, engine: str, start: int) -> Findings:
    """Feed `count` messages, the same ones for the same `start`. Stops at the first batch that is stuck."""
    findings = Findings(engine, start)
    began = time.monotonic()
    with line(engine) as made:
        batch: list[Fuzzed] = []
        for fuzzed in drawn(messages(made.model), count, start):
            batch.append(fuzzed)
            if len(batch) == BATCH or findings.sent + len(batch) == count:
                made.feed(batch, findings)
                batch = []
                if findings.before is None and findings.sent >= count * WARM:
                    findings.before = made.idle()
                if any(fault.startswith("stuck") for fault in findings.faults):
                    break
                print(f"{findings.sent} messages, {len(findings.faults)} faults", file=sys.stderr, flush=True)
        else:
            findings.after = made.idle()
            _judge(findings)
    findings.seconds = round(time.monotonic() - began, 1)
    return findings


def _judge(findings: Findings) -> None:
    before, after = findings.before, findings.after
    assert before is not None
    assert after is not None
    for name in ("files", "threads"):
        if getattr(after, name) > getattr(before, name) + LOOSE:
            findings.faults.append(f"the worker has more {name} than before: {before}, {after}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--messages", type=int, default=10_000)
    parser.add_argument("--engine", choices=ENGINES, default="stub")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    findings = run(args.messages, args.engine, args.seed)
    print(json.dumps(findings.report(), indent=2))
    sys.exit(1 if findings.faults else 0)


if __name__ == "__main__":
    main()
