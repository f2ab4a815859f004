"""Checks broker and store before a process starts."""

from __future__ import annotations

import logging
from contextlib import closing
from typing import Final

from redis import Redis
from redis.exceptions import RedisError, ResponseError

from producers.connection.aws import AwsNotInstalled
from producers.connection.connect import connect, shown
from producers.connection.script import Call, script, text
from producers.connection.trouble import NotPrimary, Trouble, UnusableServer, trouble
from producers.errors import PenstockError
from producers.store.blobs import open_blobs

log = logging.getLogger(__name__)

#: The permissions that Penstock's user needs, in the syntax of ACLs.
RIGHTS: Final = "~* &* +@all -@admin -@dangerous +info"


class ServerRefused(PenstockError):
    """The broker or the store cannot be used; the message says why, and what to use instead."""


class ServerAway(ServerRefused):
    """It does not answer, and another try may succeed."""


def check_server(url: str, role: str, *, must_answer: bool = True) -> None:
    """Check a server. Raises ServerRefused, with the reason, if it cannot be used as `role` (broker or store).

    An unreachable server is refused, with ServerAway, only if it must answer. Bad settings that Penstock can run with
    are logged.
    """
    try:
        with closing(connect(url)) as client:
            _may(client)
            _may_look(client, role, shown(url))
            _look_at_memory(client, role, shown(url))
    except (ValueError, RedisError, OSError) as error:
        said = str(error).replace(url, shown(url))
        if isinstance(error, ValueError) or trouble(error) in (Trouble.UNUSABLE, Trouble.DENIED, None):
            raise ServerRefused(f"cannot use the {role} at {shown(url)}: {said}") from error
        if must_answer or isinstance(error, NotPrimary):
            refused = ServerRefused if isinstance(error, NotPrimary) else ServerAway
            raise refused(f"cannot reach the {role} at {shown(url)}: {said}") from error
        log.warning("the %s at %s does not answer yet: %s", role, shown(url), said)


def check_files(place: str) -> None:
    """Check where files' content is. Raises ServerRefused, with the reason, for what only an operator can mend.

    A bucket that does not answer is logged.
    """
    try:
        open_blobs(place).check()
    except (ValueError, AwsNotInstalled, OSError) as error:
        if isinstance(error, OSError) and trouble(error) is Trouble.AWAY:
            log.warning("the place of files does not answer yet: %s", error)
            return
        raise ServerRefused(f"cannot use --files-dir: {error}") from error


def _may(client: Redis) -> None:
    """Check the user's permissions. Raises the server's error, which names the command or the key."""
    probe = Call(script(__package__, "probe"), ("penstock:task:probe",), ("penstock:tokens:probe",))
    try:
        client.script_load(probe.script.text)
        for command in (probe.command, probe.whole):
            client.execute_command(*command)
        client.execute_command("HGETALL", "penstock:task:probe")
        with closing(client.pubsub()) as channel:
            channel.subscribe("penstock:tokens:probe")
            channel.get_message(timeout=5.0)
    except RedisError as error:
        if trouble(error) is Trouble.DENIED:
            user = text(client.execute_command("ACL", "WHOAMI"))
            raise type(error)(f"user {user!r}: {error}. It needs {RIGHTS}") from error
        raise


def _may_look(client: Redis, role: str, where: str) -> None:
    """Warn where the user may not ask who listens: LEASE, LOOK and REAP then go by leases alone (docs/failover.md)."""
    try:
        client.execute_command("PUBSUB", "NUMSUB", "penstock:alive:probe")
    except RedisError as error:
        if trouble(error) is not Trouble.DENIED:
            raise
        log.warning(
            "the user of the %s at %s may not call PUBSUB NUMSUB: a killed worker's streams wait until its lease "
            "lapses. It needs %s",
            role,
            where,
            RIGHTS,
        )


def _look_at_memory(client: Redis, role: str, where: str) -> None:
    try:
        memory = client.info("memory")
    except ResponseError as error:
        log.info("cannot look at the %s's settings: %s", role, error)
        return
    policy, limit = memory.get("maxmemory_policy", "noeviction"), memory.get("maxmemory", 0)
    if not limit or policy == "noeviction":
        return
    if policy.startswith("allkeys"):
        raise UnusableServer(
            f"it evicts any key when its memory is full (maxmemory-policy {policy}), queued tasks too, which would be "
            "lost. Set maxmemory-policy to noeviction: then new tasks are refused instead"
        )
    log.warning(
        "the %s at %s evicts keys that expire when its memory is full (maxmemory-policy %s): workers' leases and "
        "results would go before their time; set maxmemory-policy to noeviction",
        role,
        where,
        policy,
    )
