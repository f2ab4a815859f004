"""Every key of the broker in Redis or Valkey, in one place (the scripts spell the same names)."""

from __future__ import annotations

from typing import Final

from producers.contract.keys import TIERS
from producers.contract.message import Message

#: Separates a queue's name from its tier's number in the name of a list: printable, so that any scaler can name it.
#: Not part of any queue's name, because kombu finds a list's queue by cutting its name at the last separator.
SEP: Final = "#"
#: kombu's default separator. Plain Celery senders use it, so workers also read the lists of these names.
KOMBU_SEP: Final = "\x06\x16"


INCARNATIONS: Final = "penstock:incarnations"  # hash: incarnation -> queue
DEAD: Final = "penstock:dead"  # list: {"reason", "list", "at", "message"}
REAPED: Final = "penstock:reaped"  # hash: task id -> deliveries that their worker did not survive
RETURNED: Final = "penstock:returned"  # hash: task id -> number of arrival, of messages that returned to their list
DELIVERIES: Final = "penstock:deliveries"  # string: how many messages were ever taken by workers
DELIVERED_TOKENS: Final = "penstock:deliveries:tokens"  # string: KV tokens that they might need, by their senders
ARRIVALS: Final = "penstock:arrivals"  # string: how many messages were ever sorted
WEIGHTS: Final = "penstock:weights"  # hash: tenant -> its weight, if that is not 1
UNSERVED: Final = "penstock:unserved"  # hash: list -> ms since when its head waits
PREFIXES: Final = "penstock:prefixes"  # hash: mark of a prefix -> the incarnation that entered it last


def inflight(incarnation: str) -> str:
    """Hash: delivery UUID -> message."""
    return f"penstock:inflight:{incarnation}"


def held(incarnation: str) -> str:
    """Hash: each mark that the incarnation holds -> 1; `room` -> what it had free at its last FETCH."""
    return f"penstock:held:{incarnation}"


def delayed(queue: str) -> str:
    """Sorted set: messages given back, by the time at which they are due (ms)."""
    return f"penstock:delayed:{queue}"


def sorted_of(list_name: str) -> str:
    """Sorted set: a list's messages that are sorted by tenant, by number of arrival (see `fetch.lua`)."""
    return f"penstock:sorted:{list_name}"


def turns(list_name: str) -> str:
    """Sorted set: the tenants with waiting messages in a list, by their served tokens / weight."""
    return f"penstock:turns:{list_name}"


def rested(list_name: str) -> str:
    """Sorted set: tenants without waiting messages that were served more than one who waits, by the same."""
    return f"penstock:rested:{list_name}"


def turn(list_name: str, tenant: str) -> str:
    """Sorted set: the numbers of a tenant's messages in a list; the empty name is that of all without a tenant."""
    return f"penstock:turn:{list_name}:{tenant}"


def tier_list(queue: str, tier: str) -> str:
    """The list that holds a tier of a queue, as kombu names it."""
    priority = TIERS[tier][1]
    return f"{queue}{SEP}{priority}" if priority else queue


def tier_lists(queue: str, tier: str) -> list[str]:
    """Every list that may hold a tier of a queue: ours, and that of a sender with kombu's own separator."""
    priority = TIERS[tier][1]
    return [tier_list(queue, tier), *([f"{queue}{KOMBU_SEP}{priority}"] if priority else [])]


def list_of(message: Message) -> str:
    """The list of a message."""
    return tier_list(message.queue, message.tier)
