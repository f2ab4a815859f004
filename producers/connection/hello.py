"""Checks a server by its answer to HELLO, the first command of each new connection.

HELLO -> kind, version, role -> UnusableServer, NotPrimary, or it is used
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from redis.exceptions import RedisError, ResponseError

from producers.connection.script import text
from producers.connection.trouble import NotPrimary, UnusableServer, trouble

#: Least Redis version: scripts with flags (`#!lua flags=allow-oom`) need it. Every Valkey version is later.
REDIS: Final = (7, 0)


def check_hello(answer: Mapping[Any, Any] | Sequence[Any], where: str) -> None:
    """Check HELLO's answer. Raises UnusableServer or NotPrimary. `where`: the server's name for messages."""
    pairs = answer.items() if isinstance(answer, Mapping) else zip(answer[::2], answer[1::2], strict=True)
    said = {text(name): text(value) for name, value in pairs}
    kind = f"{said['server']} {said['version']}"
    if said["mode"] == "cluster":
        raise UnusableServer(
            f"the server at {where} is a Redis Cluster, which Penstock cannot use: its scripts change several keys "
            "at once. Use a single primary, with Sentinel for failover"
        )
    if said["mode"] == "sentinel":
        raise UnusableServer(
            f"the server at {where} is a Sentinel, which holds no data; to ask it for the primary, write "
            f"redis+sentinel://{where}/NAME"
        )
    if said["server"] == "redis" and _version(said["version"]) < REDIS:
        least = ".".join(map(str, REDIS))
        raise UnusableServer(f"the server at {where} is {kind}; Penstock needs Redis {least} or later, or any Valkey")
    if said["role"] != "master":
        raise NotPrimary(
            f"the server at {where} is a replica, which takes no writes; name its primary, or Sentinels that know it"
        )


def not_hello(error: ResponseError, where: str) -> RedisError:
    """The exception to raise if HELLO is refused. Servers before Redis 6 do not know it."""
    if trouble(error) is not None:
        return error
    return UnusableServer(
        f"the server at {where} does not know HELLO ({error}): it is older than Redis 6, or a proxy. "
        f"Penstock needs Redis {'.'.join(map(str, REDIS))} or later, or any Valkey"
    )


def _version(said: str) -> tuple[int, ...]:
    return tuple(int(part) for part in said.split(".")[:2] if part.isdigit())
