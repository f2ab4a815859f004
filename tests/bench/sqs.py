"""What the broker on SQS asks and adds: `python -m tests.bench.sqs`. One JSON line for each of:

load      requests to SQS for each task, in a steady load of tasks of `--task-seconds`, with room for `--room` at a time
latency   from the call that sends a message until a worker's fetch has it, without the time of SQS's own server
idle      requests an hour of a worker with four tiers and nothing to do; how long it takes to have a `priority` message

A real Valkey, moto's server as SQS, a worker's side of the broker as the worker drives it; no engine. All requests are
timed where botocore hands them to HTTP. From the begin of a message's SendMessage until the answer that brings it, time
is the server's; what else passes is added by Penstock and boto3.
"""

from __future__ import annotations

import argparse
import heapq
import json
import statistics
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from botocore.httpsession import URLLib3Session

from producers.broker.values import Ack, Credit, Rules
from tests.aws import running_aws
from tests.processes import valkey
from tests.producers.broker.sqs.place import INC, QUEUE, Place, ids, placed

TOKENS = 100
RULES = Rules((10**6, 10**9), TOKENS, 30.0, 5)


@dataclass
class Timed:
    """Requests by action; when each SendMessage began and each ReceiveMessage that brought something was answered."""

    asked: Counter[str] = field(default_factory=Counter)
    took: Counter[str] = field(default_factory=Counter)
    """Seconds, by action."""
    sent: float = 0.0
    brought: float = 0.0

    def note(self, request: Any, began: float, answer: Any) -> None:
        action = request.headers["X-Amz-Target"].decode().partition(".")[2]
        self.asked[action] += 1
        self.took[action] += time.perf_counter() - began  # type: ignore[assignment]
        if action.startswith("SendMessage"):
            self.sent = began
        elif action == "ReceiveMessage" and b'"Messages"' in answer.content:
            self.brought = time.perf_counter()


@contextmanager
def timed() -> Iterator[Timed]:
    """All that botocore sends in this process."""
    real, found = URLLib3Session.send, Timed()

    def send(self: Any, request: Any) -> Any:
        began = time.perf_counter()
        answer = real(self, request)
        found.note(request, began, answer)
        return answer

    URLLib3Session.send = send
    try:
        yield found
    finally:
        URLLib3Session.send = real


class Intake:
    """Fetches as a worker does: when something may have come or may fit, and once a second."""

    def __init__(self, place: Place) -> None:
        self.place, self.wake, self._uuids = place, threading.Event(), count()
        self._waker = place.consumer.waker(self.wake.set)
        self._waker.start()

    def fetch(self, room: int) -> list[Any]:
        """What there is for so many sequences."""
        self.wake.clear()
        fresh = [f"u{next(self._uuids)}" for _ in range(min(32, max(1, room)))]
        fetched = self.place.consumer.fetch(INC, fresh, Credit((room,) * 4, (10**9,) * 4), RULES)
        assert fetched is not None
        return fetched

    def next(self, room: int = 64) -> list[Any]:
        while not (found := self.fetch(room)):
            self.wake.wait(1.0)
        return found


def load(place: Place, asked: Timed, tasks: int, room: int, seconds: float) -> dict[str, Any]:
    """The first tenth warms up and is not counted."""
    for number in range(tasks):
        place.send(f"t{number}")
    intake, running, done, begun = Intake(place), list[tuple[float, str]](), 0, 0.0
    before: Counter[str] = Counter()
    while done < tasks:
        now = time.perf_counter()
        for one in intake.fetch(room - len(running)):
            heapq.heappush(running, (now + seconds, one.uuid))
        ended = []
        while running and running[0][0] <= now:
            ended.append(Ack(INC, heapq.heappop(running)[1], used=TOKENS))
        place.consumer.put_down(ended)
        done += len(ended)
        if not begun and done >= tasks / 10:
            begun, before, warm = now, asked.asked.copy(), done
        intake.wake.wait(max(0.0, min(1.0, running[0][0] - time.perf_counter())) if running else 1.0)
    took = time.perf_counter() - begun
    place.consumer._receiver.flush(10.0)
    counts = asked.asked - before
    whole = counts["ReceiveMessage"] + counts["DeleteMessageBatch"]
    return {
        "tasks": tasks - warm,
        "tasks_per_s": round((tasks - warm) / took, 1),
        **{action: counts[action] for action in ("ReceiveMessage", "DeleteMessageBatch")},
        "ChangeMessageVisibilityBatch": counts["ChangeMessageVisibilityBatch"],
        "requests_per_task": round(whole / (tasks - warm), 3),
    }


def latency(place: Place, asked: Timed, messages: int) -> dict[str, Any]:
    """One message at a time, to a worker that waits for it."""
    intake, added, servers = Intake(place), [], []
    for number in range(messages):
        intake.fetch(64)
        time.sleep(0.02)  # its poll is under way
        began = time.perf_counter()
        place.send(f"l{number}")
        (one,) = intake.next()
        whole, server = time.perf_counter() - began, asked.brought - asked.sent
        assert ids([one]) == [f"l{number}"]
        place.consumer.put_down([Ack(INC, one.uuid)])
        added.append(whole - server)
        servers.append(server)
    return {"messages": messages, **_ms("added", added), **_ms("server", servers)}


def idle(place: Place, asked: Timed, seconds: float, wakes: int) -> dict[str, Any]:
    intake = Intake(place)
    intake.fetch(64)
    time.sleep(1.0)
    before, began = asked.asked.copy(), time.perf_counter()
    while (now := time.perf_counter()) < began + seconds:
        intake.wake.wait(min(1.0, began + seconds - now))
        intake.fetch(64)
    counts = asked.asked - before
    waited = []
    for number in range(wakes):
        time.sleep(0.5)
        began = time.perf_counter()
        place.send(f"w{number}", tier="priority")
        (one,) = intake.next()
        waited.append(time.perf_counter() - began)
        place.consumer.put_down([Ack(INC, one.uuid)])
    hourly = sum(counts.values()) * 3600 / seconds
    return {"seconds": seconds, "requests_per_hour": round(hourly), "wake_ms_max": round(max(waited) * 1e3, 1)}


def _ms(name: str, seconds: list[float]) -> dict[str, float]:
    spread = statistics.quantiles(seconds, n=100)
    return {f"{name}_ms_p50": round(spread[49] * 1e3, 2), f"{name}_ms_p99": round(spread[98] * 1e3, 2)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", type=int, default=1000)
    parser.add_argument("--room", type=int, default=64)
    parser.add_argument("--task-seconds", type=float, default=1.0)
    parser.add_argument("--messages", type=int, default=300)
    parser.add_argument("--idle-seconds", type=float, default=120.0)
    parser.add_argument("--wakes", type=int, default=20)
    args = parser.parse_args()
    with valkey() as (url, redis), running_aws() as aws:
        for name, measure, sizes in (
            ("load", load, (args.tasks, args.room, args.task_seconds)),
            ("latency", latency, (args.messages,)),
            ("idle", idle, (args.idle_seconds, args.wakes)),
        ):
            redis.flushall()
            aws.reset()
            with timed() as asked, placed(aws, url, redis, prefix=f"{name}-") as place:
                print(json.dumps({"what": name, "queue": QUEUE, **measure(place, asked, *sizes)}), flush=True)


if __name__ == "__main__":
    main()
