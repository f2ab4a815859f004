"""A worker with many running sequences is told to stop, while another has room: how long until it is gone, and until
its streams go on there.

    python -m tests.chaos.drain --running 200 --drain 2 --signal SIGTERM
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import asdict, dataclass

from redis import Redis

from producers.contract import keys
from tests.processes import Worker, fill, valkey
from tests.stub_engine import token

QUEUE = keys.version_queue("stub", "v1")
#: What the other worker may take to come up, seconds: so long, and no longer, the sequences have to run.
BOOT_S = 15.0
#: What is promised, seconds: beyond the drain time; from handing back to the next token.
EXIT_S, RESUME_S = 2.0, 1.0


@dataclass(frozen=True, slots=True)
class Report:
    """Times in seconds."""

    running: int
    drain_s: float
    status: int
    exit_s: float
    """From the signal to the process's end, less the drain time."""
    resume_p50_s: float
    resume_max_s: float
    """From the end of the drain time to a stream's next token."""
    pause_max_s: float
    """Between a stream's last token by the one worker and its first by the other."""
    deaths: int
    wrong: int
    """Streams that are not what an uninterrupted run gives, or not contiguous."""

    @property
    def kept(self) -> bool:
        return (
            self.status == 0
            and self.exit_s <= EXIT_S
            and self.resume_max_s <= RESUME_S
            and not self.deaths
            and not self.wrong
        )


class Ears(threading.Thread):
    """When each stream's tokens came."""

    def __init__(self, redis: Redis) -> None:
        super().__init__(daemon=True)
        self.came: dict[str, list[float]] = defaultdict(list)
        self.closed = False
        self._pubsub = redis.pubsub(ignore_subscribe_messages=True)
        self._pubsub.psubscribe("penstock:tokens:*")

    def run(self) -> None:
        """Until they are closed, and all that was said is heard."""
        while True:
            over, message = self.closed, self._pubsub.get_message(timeout=0.1)
            if message is None and over:
                break
            if message is not None:
                self.came[message["channel"].removeprefix("penstock:tokens:")].append(time.monotonic())
        self._pubsub.close()


def measure(
    running: int,
    drain: float,
    how: signal.Signals,
    step: float,
    *,
    then: float | None = None,
    boot: float = BOOT_S,
    times: Mapping[str, float] | None = None,
) -> Report:
    """`then`: seconds that a step of the other worker takes, where not as many; `boot`: what it may take to come up.
    `times`: of the workers' constants, where others. Raises AssertionError where the workers do not come up."""
    room = {"STUB_SEQS": running, "lease": 300.0, "WORKER_TIMES": json.dumps(times or {})}
    with valkey() as (url, redis), Worker(url, drain=drain, STUB_STEP_S=step, **room) as first:
        first.wait_ready()
        ears = Ears(redis)
        ears.start()
        length = int((drain + boot) / step)
        ids = fill(redis, QUEUE, running, max_tokens=length)
        first.wait_until(lambda: all(len(ears.came[task_id]) > 3 for task_id in ids))
        with Worker(url, STUB_STEP_S=step if then is None else then, **room) as second:
            second.wait_ready()
            began = time.monotonic()
            first.process.send_signal(how)
            status = first.process.wait(drain + 60)
            ended = time.monotonic()
            second.wait_until(lambda: all(redis.hexists(keys.task(task_id), "settled") for task_id in ids))
            ears.closed = True
            ears.join()
        over = began + (drain if how is signal.SIGTERM else 0.0)
        resumed, pauses = [], []
        for task_id in ids:
            # What comes of another pause, later, is not the hand-back's.
            pairs = zip(ears.came[task_id], ears.came[task_id][1:], strict=False)
            after = [(a, b) for a, b in pairs if b > over and a <= ended]
            handed = max(after, key=lambda pair: pair[1] - pair[0])
            resumed.append(handed[1] - over)
            pauses.append(handed[1] - handed[0])
        resumed.sort()
        return Report(
            running,
            drain,
            status,
            round(ended - over, 3),
            round(resumed[len(resumed) // 2], 3),
            round(resumed[-1], 3),
            round(max(pauses), 3),
            sum(int(redis.hget(keys.task(task_id), "deaths") or 0) for task_id in ids),
            sum(not _right(redis, task_id, seed, length) for seed, task_id in enumerate(ids)),
        )


def _right(redis: Redis, task_id: str, seed: int, length: int) -> bool:
    entries = [json.loads(fields["e"]) for _, fields in redis.xrange(keys.stream(task_id))]
    made = [(entry[1], entry[2]) for entry in entries if isinstance(entry, list)]
    return made == [(index, token(seed, 0, index)) for index in range(length)] and entries[-1]["end"] == "completed"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--running", type=int, default=200)
    parser.add_argument("--drain", type=float, default=2.0, help="seconds")
    parser.add_argument("--step", type=float, default=0.05, help="seconds a step takes")
    parser.add_argument("--signal", default="SIGTERM", choices=["SIGTERM", "SIGQUIT"])
    asked = parser.parse_args()
    report = measure(asked.running, asked.drain, signal.Signals[asked.signal], asked.step)
    print(json.dumps(asdict(report), indent=1))
    return 0 if report.kept else 1


if __name__ == "__main__":
    sys.exit(main())
