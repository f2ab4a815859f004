"""A broker's URL: `sqs://REGION?prefix=pen-`, and what else may stand in its query.

| option | meaning |
| --- | --- |
| `prefix` | what names of queues begin with; 1 to 20 of `A-Za-z0-9_-`, by default `pen-` |
| `endpoint_url` | another server than AWS's own |
| `visibility` | seconds for which others do not see a received message, renewed at half; 10 to 3600, default 60 |
| `celery` | `1` if workers also poll the model's queue for plain Celery senders |
| `fifo` | `1` if queues are FIFO queues: tasks of one `order_key` run one after another |
| `account` | the queues' account, where it is not that of the credentials |
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final
from urllib.parse import parse_qsl, urlsplit

from producers.broker.values import Capabilities

SCHEME: Final = "sqs"
MIN_VISIBILITY_S: Final = 10
MAX_VISIBILITY_S: Final = 3600
_OPTIONS: Final = ("prefix", "endpoint_url", "visibility", "celery", "fifo", "account")
_REGION: Final = re.compile(r"[a-z0-9-]+")
_PREFIX: Final = re.compile(r"[A-Za-z0-9_-]{1,20}")
_ACCOUNT: Final = re.compile(r"[0-9]{12}")


@dataclass(frozen=True, slots=True)
class Address:
    """A broker's URL, as read."""

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
    """Raises ValueError, which says what is wrong with the URL."""
    parts = urlsplit(url)
    if not is_sqs(url):
        raise ValueError(f"{url!r} does not begin with sqs://")
    region = parts.netloc
    if not _REGION.fullmatch(region) or parts.path.strip("/"):
        raise ValueError(f"{url!r} names no region: it must be like sqs://us-east-1?prefix=pen-")
    options = dict(parse_qsl(parts.query, keep_blank_values=True))
    if unknown := sorted(options.keys() - set(_OPTIONS)):
        raise ValueError(f"{url!r} has the option {unknown[0]}; known are {', '.join(_OPTIONS)}")
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
    """The broker's promises. SQS has no front of a queue, and its standard queues keep no order."""
    return Capabilities(
        front_of_queue=False,
        max_message_bytes=1024 * 1024,  # of a queue that says no less
        pool_queues=False,
        prunes=False,
        order_per_key=address.fifo,
    )


def _visibility(options: dict[str, str]) -> int:
    said = options.get("visibility", "60")
    if not said.isdecimal() or not MIN_VISIBILITY_S <= int(said) <= MAX_VISIBILITY_S:
        raise ValueError(f"visibility is {said!r}; it must be {MIN_VISIBILITY_S} to {MAX_VISIBILITY_S} seconds")
    return int(said)


def _flag(options: dict[str, str], name: str) -> bool:
    said = options.get(name, "0")
    if said not in ("0", "1", "false", "true"):
        raise ValueError(f"{name} is {said!r}; it must be 0 or 1")
    return said in ("1", "true")
