"""Deliveries of webhooks by one process: how many a second, how soon, and whether receivers that hang slow others.

    python -m tests.bench.webhooks

Rows enter the outbox as the scripts put them there. `latency` is from a row's entry to its arrival at the receiver.
Each receiver is a tenant's; those that hang never answer.
"""

from __future__ import annotations

import argparse
import time

from redis import Redis

from producers.connection.script import run
from producers.contract.webhook import new_secret
from producers.store import outbox
from tests.processes import valkey
from tests.receiver import Receiver
from tests.webhooks_process import WebhooksProcess


def put(redis: Redis, number: int, url: str, tenant: str, secret: str) -> None:
    row = {"webhook_id": f"evt_{number}", "type": "response.completed", "object": f"resp_{number}", "url": url}
    run(redis, outbox.put(f"evt_{number}.own", row | {"tenant": tenant, "secret": secret}))


def offered(rate: float, seconds: float, receivers: int, hanging: int) -> list[float]:
    """Latencies (s), sorted, of events offered at `rate` a second to `receivers`, of which `hanging` hang."""
    count, secret = int(rate * seconds), new_secret()
    sent: dict[str, float] = {}
    with (
        valkey() as (url, redis),
        Receiver() as good,
        Receiver() as bad,
        WebhooksProcess(url, timeout=20.0, lease=60.0),
    ):
        until_ready(redis, good, secret)
        began = time.time()
        for number in range(count):
            time.sleep(max(0.0, began + number / rate - time.time()))
            tenant = number % receivers
            hangs = tenant < hanging
            if not hangs:
                sent[f"evt_{number}"] = time.time()
            put(redis, number, f"{bad.url}/hang" if hangs else f"{good.url}/ok", f"tenant{tenant}", secret)
        arrived = until_arrived(good, len(sent) + 1)
    return sorted(arrived[name] - at for name, at in sent.items())


def most(count: int, receivers: int) -> float:
    """Deliveries a second of a process that finds `count` rows."""
    secret = new_secret()
    with valkey() as (url, redis), Receiver() as good:
        for number in range(count):
            put(redis, number, f"{good.url}/ok", f"tenant{number % receivers}", secret)
        with WebhooksProcess(url, timeout=20.0, lease=60.0):
            arrived = sorted(until_arrived(good, count).values())
    return (count - 1) / (arrived[-1] - arrived[0])


def until_ready(redis: Redis, receiver: Receiver, secret: str) -> None:
    put(redis, -1, f"{receiver.url}/ok", "first", secret)
    receiver.event()


def until_arrived(receiver: Receiver, count: int) -> dict[str, float]:
    """Webhook-id -> first arrival (unix s), once so many have come."""
    receiver.until(lambda: time.sleep(0.5) or receiver.log.read_bytes().count(b"\n") > count, 600)
    found: dict[str, float] = {}
    for event in receiver.events:
        found.setdefault(event.id, event.at)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate", type=float, default=500.0, help="events offered a second")
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--receivers", type=int, default=20, help="a tenth of them hang in the last run")
    parser.add_argument("--rows", type=int, default=10_000, help="rows that wait when the process starts")
    asked = parser.parse_args()
    for receivers in (1, asked.receivers):
        print(f"{asked.rows} rows wait for {receivers} receivers: {most(asked.rows, receivers):.0f} deliveries/s")
    for hanging in (0, max(1, asked.receivers // 10)):
        found = offered(asked.rate, asked.seconds, asked.receivers, hanging)
        p50, p95, p99 = (1000 * found[int(share * (len(found) - 1))] for share in (0.5, 0.95, 0.99))
        print(
            f"{asked.rate:g} events/s to {asked.receivers} receivers, {hanging} hang; latency of the others: "
            f"p50 {p50:.1f} ms, p95 {p95:.1f} ms, p99 {p99:.1f} ms"
        )


if __name__ == "__main__":
    main()
