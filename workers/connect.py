"""Connections to the broker and the store."""

from __future__ import annotations

import re
from typing import Any, Final
from urllib.parse import urlsplit

from redis import Redis
from redis.backoff import NoBackoff
from redis.exceptions import (
    ConnectionError,
    MasterDownError,
    NoPermissionError,
    OutOfMemoryError,
    ReadOnlyError,
    RedisError,
    TimeoutError,
)
from redis.retry import Retry

from workers.errors import Refused

#: What a lost or refused connection raises, besides OSError.
LOST = (RedisError, OSError)
#: How a server says that it takes no such call from anybody just now. Before Redis 7 it stands inside a script's error.
_UNFIT: Final = re.compile(r"(?:^|-)(?:OOM|READONLY|MISCONF|NOREPLICAS|MASTERDOWN|LOADING|BUSY|TRYAGAIN|NOPERM)\b")
_UNFIT_TYPES: Final = (
    ConnectionError,
    TimeoutError,
    MasterDownError,
    NoPermissionError,
    OutOfMemoryError,
    ReadOnlyError,
    OSError,
)


def is_passing(error: Exception) -> bool:
    """Whether the server is away, full, read-only or loading: so that the same call may do later."""
    return isinstance(error, _UNFIT_TYPES) or _UNFIT.search(str(error)) is not None


def connect(url: str, **options: Any) -> Redis:
    """A client of its own. It does not retry by itself: each caller knows what a lost reply means."""
    if urlsplit(url).scheme != "unix":  # whose connections know neither
        options |= {"socket_connect_timeout": 2.0, "socket_keepalive": True}
    client: Redis = Redis.from_url(
        url,
        socket_timeout=options.pop("socket_timeout", 5.0),
        retry=Retry(NoBackoff(), 0),
        **options,
    )
    return client


def without_password(url: str) -> str:
    """The URL as it may be shown: neither user nor password, nor what follows the path (it may name them, too)."""
    scheme, mark, rest = url.partition("://")
    place = (rest if mark else url).rpartition("@")[2].partition("?")[0]
    return f"{scheme}{mark}{place}" if mark else place


def check_server(url: str, role: str) -> None:
    """Raises Refused when the server cannot be reached, or is a cluster: the scripts touch several keys at once."""
    shown = without_password(url)
    try:
        client = connect(url)
        enabled = client.info("cluster").get("cluster_enabled")
        client.close()
    except (ValueError, *LOST) as exc:
        raise Refused(f"cannot reach the {role} at {shown}: {str(exc).replace(url, shown)}") from exc
    if enabled:
        raise Refused(
            f"the {role} at {shown} is a Redis Cluster, which Penstock cannot use: its scripts change several keys "
            "at once. Use a single primary, with Sentinel for failover."
        )
