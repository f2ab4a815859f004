"""How many tokens a second the publisher streams: `python -m tests.bench.publish`.

The worker's own publisher thread and a real Valkey; the engine's side is a loop that hands over one event a sequence a
step, made beforehand. Every token is appended to its task's durable stream and published on its channel.
"""

from __future__ import annotations

import argparse
import json
import time
from types import SimpleNamespace
from typing import Any

from engine.request import Event
from producers.connection.script import run
from producers.contract import keys
from producers.store.protocol import claim, read_claim
from tests.processes import fill, valkey
from workers.flow.deliveries import Deliveries
from workers.flow.publisher import Publisher
from workers.measure import Measured
from workers.settings import WorkerSettings
from workers.state.delivery import Delivery, Incarnation
from workers.state.served import Served


def measure(sequences: int, steps: int) -> dict[str, float]:
    with valkey() as (url, redis):
        life = Incarnation("bench")
        redis.set(keys.lease(life.id), "{}")
        ids = fill(redis, "penstock:queue:stub", sequences, max_tokens=steps)
        finished: list[str] = []
        engine = SimpleNamespace(abort=lambda _: None, max_num_seqs=sequences, kv_tokens_total=0)
        settings = WorkerSettings(broker=url, store=url, model="stub")
        served = Served(settings, engine, {"name": "stub"}, {}, keys.Pool("stub", "v1", "stub"))
        acker: Any = None
        finisher: Any = SimpleNamespace(
            may_retry=lambda _: False, finish=lambda d, status, error="null": finished.append(status)
        )
        deliveries = Deliveries(served, acker)
        for task_id in ids:
            delivery = Delivery(f"c-{task_id}", task_id, life)
            record = read_claim(task_id, run(redis, claim(task_id, delivery.uuid, life.id, served.pool))).record
            assert record is not None
            delivery.begin(record, record.nexts)
            deliveries.running[delivery.uuid] = deliveries.by_uuid[delivery.uuid] = delivery
        breaker: Any = SimpleNamespace(completed=lambda: None)
        publisher = Publisher(served, deliveries, finisher, print, Measured(engine), breaker)
        events = [[_event(uuid, step, steps) for uuid in deliveries.running] for step in range(steps)]
        publisher.start()
        start = time.perf_counter()
        for batch in events:
            for event in batch:
                publisher.on_event(event)
            publisher.on_step()
            time.sleep(0)  # as an engine does between two steps
        while len(finished) < sequences:
            time.sleep(0.001)
        seconds = time.perf_counter() - start
        publisher.stop(60)
        assert all(redis.xlen(keys.stream(task_id)) == steps + 1 for task_id in ids), "a stream is not whole"
        return {"tokens": sequences * steps, "seconds": seconds, "tokens_per_s": sequences * steps / seconds}


def _event(uuid: str, step: int, steps: int) -> Event:
    last = step == steps - 1
    return Event(
        request_id=uuid,
        choice=0,
        index=step,
        token_ids=[step],
        texts=[" word"],
        logprobs=None,
        finish_reason="length" if last else None,
        stop_match=None,
        done=last,
        error=None,
        prompt_tokens=4,
        cached_tokens=0,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sequences", type=int, default=256)
    parser.add_argument("--steps", type=int, default=1000)
    args = parser.parse_args()
    print(json.dumps(measure(args.sequences, args.steps)))


if __name__ == "__main__":
    main()
