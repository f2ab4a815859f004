"""A broker's URL, `sqs://REGION?prefix=pen-`, and the names of its SQS queues.

| option | meaning |
| --- | --- |
| `prefix` | what names of queues begin with; 1 to 20 of `A-Za-z0-9_-`, by default `pen-` |
| `endpoint_url` | another server than AWS's own |
| `visibility` | seconds for which others do not see a received message, renewed at half; 10 to 3600, default 60 |
| `celery` | `1` if workers also poll the model's queue for plain Celery senders |
| `fifo` | `1` if queues are FIFO queues: tasks of one `order_key` run one after another |
| `account` | the queues' account, where it is not that of the credentials |

Names have at most 80 of `A-Za-z0-9_-`, and are a function of Penstock's own name of the queue and its tier:

    penstock:queue:tiny@4f1c.., priority   ->   pen-tiny_4f1c.._9a31f00d-priority[.fifo]
    penstock:queue:tiny                    ->   pen-penstock_queue_tiny        as kombu names it, for Celery's senders

The eight hex digits are of the SHA-256 of Penstock's name, so that two names never meet. A queue's tags hold Penstock's
name and the tier, which cannot be read back from SQS's own.
"""

from __future__ import annotations

import hashlib
import re
import string
from dataclasses import dataclass
from typing import Final
from urllib.parse import parse_qsl, urlsplit

from producers.broker.values import Capabilities
from producers.connection.aws import check_no_password
from producers.contract.keys import TIERS

SCHEME: Final = "sqs"
MIN_VISIBILITY_S: Final = 10
MAX_VISIBILITY_S: Final = 3600
#: Tags of every queue: Penstock's name of it, and its tier.
QUEUE_TAG: Final = "penstock:queue"
TIER_TAG: Final = "penstock:tier"
#: Characters of a queue's name, at most.
MAX_NAME: Final = 80
_OPTIONS: Final = ("prefix", "endpoint_url", "visibility", "celery", "fifo", "account")
_REGION: Final = re.compile(r"[a-z0-9-]+")
_PREFIX: Final = re.compile(r"[A-Za-z0-9_-]{1,20}")
_ACCOUNT: Final = re.compile(r"[0-9]{12}")
_QUEUES: Final = "penstock:queue:"
#: kombu's translation (`kombu.transport.SQS.CHARS_REPLACE_TABLE`).
_KOMBU: Final = str.maketrans({c: "_" for c in string.punctuation if c not in "-_."} | {".": "-"})


@dataclass(frozen=True, slots=True)
class Address:
    """A broker's URL, parsed."""

    region: str
    prefix: str = "pen-"
    endpoint_url: str = ""
    visibility: int = 60
    """Seconds for which a received message is hidden from others."""
    celery: bool = False
    """Whether workers poll the queue for plain Celery senders, too."""
    fifo: bool = False
    account: str = ""


def is_sqs(url: str) -> bool:
    return url.startswith(f"{SCHEME}://")


def read(url: str) -> Address:
    """Parse a broker's URL. Raises ValueError, whose text names the fault."""
    parts = urlsplit(url)
    if not is_sqs(url):
        raise ValueError(f"{url!r} does not begin with sqs://")
    check_no_password(url)
    region = parts.netloc
    if not _REGION.fullmatch(region) or parts.path.strip("/"):
        raise ValueError(f"{url!r} names no region: it must be like sqs://us-east-1?prefix=pen-")
    options = dict(parse_qsl(parts.query, keep_blank_values=True))
    if unknown := sorted(options.keys() - set(_OPTIONS)):
        raise ValueError(f"sqs://{region} has the option {unknown[0]}; known are {', '.join(_OPTIONS)}")
    prefix, account = options.get("prefix", "pen-"), options.get("account", "")
    if not _PREFIX.fullmatch(prefix):
        raise ValueError(f"prefix is {prefix!r}; it must have 1 to 20 of the characters A-Z a-z 0-9 _ -")
    if account and not _ACCOUNT.fullmatch(account):
        raise ValueError(f"account is {account!r}; it must have 12 digits")
    endpoint = options.get("endpoint_url", "")
    if endpoint and urlsplit(endpoint).scheme not in ("http", "https"):
        raise ValueError(f"endpoint_url is {endpoint!r}; it must begin with http:// or https://")
    return Address(
        region, prefix, endpoint, _visibility(options), _flag(options, "celery"), _flag(options, "fifo"), account
    )


def capabilities(address: Address) -> Capabilities:
    """The broker's guarantees. SQS has no front of a queue, and its standard queues keep no order."""
    return Capabilities(
        front_of_queue=False,
        max_message_bytes=1024 * 1024,  # unless a queue has a lower limit
        pool_queues=False,
        prunes=False,
        order_per_key=address.fifo,
    )


def _visibility(options: dict[str, str]) -> int:
    value = options.get("visibility", "60")
    if not value.isdecimal() or not MIN_VISIBILITY_S <= int(value) <= MAX_VISIBILITY_S:
        raise ValueError(f"visibility is {value!r}; it must be {MIN_VISIBILITY_S} to {MAX_VISIBILITY_S} seconds")
    return int(value)


def _flag(options: dict[str, str], name: str) -> bool:
    value = options.get(name, "0")
    if value not in ("0", "1", "false", "true"):
        raise ValueError(f"{name} is {value!r}; it must be 0 or 1")
    return value in ("1", "true")


# ---- names of queues -----------------------------------------------------------------------------------------------


def is_celery(queue: str) -> bool:
    """Whether it is a queue for plain Celery, such as a model's own: one list, of the tier `default`."""
    return "@" not in queue or not queue.startswith(_QUEUES)


def is_penstocks(queue: str) -> bool:
    """Whether only workers of Penstock take from it."""
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
    return base[: MAX_NAME - len(suffix)] + suffix


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
