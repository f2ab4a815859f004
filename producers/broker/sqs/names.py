"""Names of SQS queues: at most 80 of `A-Za-z0-9_-`, a function of Penstock's own name of the queue and its tier.

    penstock:queue:tiny@4f1c.., priority   ->   pen-tiny_4f1c.._9a31f00d-priority[.fifo]
    penstock:queue:tiny                    ->   pen-penstock_queue_tiny        as kombu names it, for Celery's senders

The eight hex digits are of the SHA-256 of Penstock's name, so that two names never meet. Tags of a queue (`TAGS`) hold
Penstock's name and the tier, which cannot be read back from SQS's own.
"""

from __future__ import annotations

import hashlib
import re
import string
from typing import Final

from producers.broker.sqs.address import Address
from producers.contract.keys import TIERS

#: Tags of every queue: Penstock's name of it, and its tier.
QUEUE_TAG: Final = "penstock:queue"
TIER_TAG: Final = "penstock:tier"
LONGEST: Final = 80
_QUEUES: Final = "penstock:queue:"
#: kombu's translation (`kombu.transport.SQS.CHARS_REPLACE_TABLE`).
_KOMBU: Final = str.maketrans({c: "_" for c in string.punctuation if c not in "-_."} | {".": "-"})


def is_celery(queue: str) -> bool:
    """Whether it is a queue of plain Celery's, such as a model's for its senders: one list, of the tier `default`."""
    return "@" not in queue or not queue.startswith(_QUEUES)


def is_penstocks(queue: str) -> bool:
    """Whether workers of Penstock take from it, and nobody else."""
    return queue.startswith(_QUEUES)


def lists(queue: str) -> list[tuple[str, str]]:
    """(list, tier) of a queue, best tier first. A list is one SQS queue; its name here is `QUEUE#TIER`."""
    if is_celery(queue):
        return [(f"{queue}#default", "default")]
    return [(f"{queue}#{tier}", tier) for tier in sorted(TIERS, key=lambda tier: TIERS[tier][0])]


def split(name: str) -> tuple[str, str]:
    """Queue and tier of a list."""
    queue, _, tier = name.rpartition("#")
    return queue, tier


def sqs_name(address: Address, name: str) -> str:
    """SQS's name of a list."""
    queue, tier = split(name)
    if is_celery(queue):
        return celery_name(address.prefix, queue)
    suffix = f"{_end(queue, tier)}{'.fifo' if address.fifo else ''}"
    base = address.prefix + re.sub(r"[^A-Za-z0-9_-]", "_", queue.removeprefix(_QUEUES))
    return base[: LONGEST - len(suffix)] + suffix


def celery_name(prefix: str, queue: str) -> str:
    """The name that kombu's SQS transport, with this `queue_name_prefix`, gives a Celery queue."""
    fifo = ".fifo" if queue.endswith(".fifo") else ""
    return (prefix + queue.removesuffix(fifo)).translate(_KOMBU) + fifo


def is_own(name: str, url: str) -> bool:
    """Whether a list's queue has a name as `sqs_name` gives it, under any prefix."""
    queue, tier = split(name)
    end = celery_name("", queue) if is_celery(queue) else _end(queue, tier)
    return url.removesuffix(".fifo").endswith(end)


def _end(queue: str, tier: str) -> str:
    return f"_{hashlib.sha256(queue.encode()).hexdigest()[:8]}-{tier}"
