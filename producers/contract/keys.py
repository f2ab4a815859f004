"""Queues, tiers, and every key and channel of the store in Redis or Valkey (the scripts spell the same names).

The broker has leases of the same name as the store, and keys of its own: `producers.broker.redis.keys`.
"""

from __future__ import annotations

from typing import Final

#: Service tier -> (rank: lower goes first, kombu priority: the list it is put into).
#: kombu gives a message without a priority 0, its first list: hence `default` is 0.
TIERS: Final[dict[str, tuple[int, int]]] = {
    "priority": (0, 3),
    "default": (1, 0),
    "flex": (2, 6),
    "batch": (3, 9),
}

TASK_NAME: Final = "penstock.generate"

SUBMITTING: Final = "penstock:submitting"  # zset: task id -> ms; what the sweeper looks at
DEADLINES: Final = "penstock:deadlines"  # zset: task id -> ms; unfinished tasks that have one, or were cancelled
UNSETTLED: Final = "penstock:unsettled"  # zset: task id -> ms; final ones whose message nobody has put down
SETTLED: Final = "penstock:settled"  # zset: task id -> ms; whose streams are to be compacted
SWEEPER: Final = "penstock:sweeper"  # string with a TTL: the sweeper that leads
SWEPT: Final = "penstock:swept"  # hash: what sweepers did -> how often
READERS: Final = "penstock:readers"  # zset: task id -> ms; when the lease of its reader ends
MODELS: Final = "penstock:models"  # hash: model name -> card (JSON)
ROUTES: Final = "penstock:routes"  # hash: model name -> queue of the pool that serves it
POOLS: Final = "penstock:pools"  # hash: queue -> {"model", "version", "fingerprint", "announced" (ms)}


def task(task_id: str) -> str:
    """Hash: the record."""
    return f"penstock:task:{task_id}"


def stream(task_id: str) -> str:
    """Stream: one entry a token, then the terminal entry; entry ids are position + 1."""
    return f"penstock:stream:{task_id}"


def result(task_id: str) -> str:
    """Hash: the stream, once compacted; number of a block -> its entries (`producers.contract.blocks`)."""
    return f"penstock:result:{task_id}"


def channel(task_id: str) -> str:
    """Channel: the same entries as they are made, each message `[position, entry, ...]`."""
    return f"penstock:tokens:{task_id}"


def control(incarnation: str) -> str:
    """Channel: words to one worker, e.g. `cancel <task id>`."""
    return f"penstock:control:{incarnation}"


def lease(incarnation: str) -> str:
    """String with a TTL: this worker incarnation is alive (its value is what it says of itself, JSON)."""
    return f"penstock:lease:{incarnation}"


def blob(sha256: str) -> str:
    """String: a tokenizer file, by its SHA-256 (hex)."""
    return f"penstock:blob:{sha256}"


def pool_queue(model: str, version: str, fingerprint: str) -> str:
    """The queue of one pool: a model version served by one kind of engine."""
    return f"penstock:queue:{model}@{version}.{fingerprint}"


def model_queue(model: str) -> str:
    """The queue for plain Celery senders, who know a model by its name alone."""
    return f"penstock:queue:{model}"
