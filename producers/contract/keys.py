"""Every key and channel of Penstock in Redis or Valkey, in one place (the scripts spell the same names).

Store: task records, token streams, model cards. Broker: lists, deliveries in flight. Both: leases.
"""

from __future__ import annotations

from typing import Final

#: Separates a queue's name from its tier's number in the name of a list: printable, so that any scaler can name it.
#: Not part of any queue's name, because kombu finds a list's queue by cutting its name at the last separator.
SEP: Final = "#"
#: What kombu takes unless it is told otherwise. Plain Celery senders do not know ours, and what they send must not lie
#: in a list that nobody reads.
KOMBU_SEP: Final = "\x06\x16"

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

INCARNATIONS: Final = "penstock:incarnations"  # hash: incarnation -> queue
DEAD: Final = "penstock:dead"  # list: {"reason", "list", "at", "message"}
REAPED: Final = "penstock:reaped"  # hash: task id -> deliveries that their worker did not survive
RETURNED: Final = (
    "penstock:returned"  # hash: task id -> number of arrival; of what is back in its list, to be sorted anew
)
DELIVERIES: Final = "penstock:deliveries"  # string: how many messages were ever taken by workers
ARRIVALS: Final = "penstock:arrivals"  # string: how many messages were ever sorted
WEIGHTS: Final = "penstock:weights"  # hash: tenant -> its share, where that is not 1
UNSERVED: Final = "penstock:unserved"  # hash: list -> ms since when its head waits


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


def inflight(incarnation: str) -> str:
    """Hash: delivery UUID -> message."""
    return f"penstock:inflight:{incarnation}"


def delayed(queue: str) -> str:
    """Sorted set: messages given back, by the time at which they are due (ms)."""
    return f"penstock:delayed:{queue}"


def sorted_of(list_name: str) -> str:
    """Sorted set: what waits of a list, sorted by tenant already, by number of arrival (see `fetch.lua`)."""
    return f"penstock:sorted:{list_name}"


def turns(list_name: str) -> str:
    """Sorted set: the tenants of whom something waits there, by what they were served (tokens / weight)."""
    return f"penstock:turns:{list_name}"


def rested(list_name: str) -> str:
    """Sorted set: the same, of tenants of whom nothing waits, who were served more than somebody who does."""
    return f"penstock:rested:{list_name}"


def turn(list_name: str, tenant: str) -> str:
    """Sorted set: the numbers of what waits there of a tenant; the empty name stands for all who give none."""
    return f"penstock:turn:{list_name}:{tenant}"


def blob(sha256: str) -> str:
    """String: a tokenizer file, by its SHA-256 (hex)."""
    return f"penstock:blob:{sha256}"


def pool_queue(model: str, version: str, fingerprint: str) -> str:
    """The queue of one pool: a model version served by one kind of engine."""
    return f"penstock:queue:{model}@{version}.{fingerprint}"


def model_queue(model: str) -> str:
    """The queue for plain Celery senders, who know a model by its name alone."""
    return f"penstock:queue:{model}"


def tier_list(queue: str, tier: str) -> str:
    """The list that holds a tier of a queue, as kombu names it."""
    priority = TIERS[tier][1]
    return f"{queue}{SEP}{priority}" if priority else queue


def tier_lists(queue: str, tier: str) -> list[str]:
    """Every list that may hold a tier of a queue: ours, and where a sender with kombu's own separator puts it."""
    priority = TIERS[tier][1]
    return [tier_list(queue, tier), *([f"{queue}{KOMBU_SEP}{priority}"] if priority else [])]
