"""Checks broker and store before a process starts."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from contextlib import closing
from typing import Any, Final

from redis import Redis
from redis.exceptions import NoPermissionError, RedisError, ResponseError

from producers.connection.aws import AwsNotInstalled
from producers.connection.connect import connect, shown
from producers.connection.script import Call, script, text
from producers.connection.trouble import NotPrimary, Trouble, UnusableServer, trouble
from producers.contract import keys
from producers.errors import PenstockError
from producers.store.blobs import open_blobs
from producers.store.epoch import RESTORING

log = logging.getLogger(__name__)

#: The permissions that Penstock's user needs, in the syntax of ACLs; docs/run/servers.md has the least.
RIGHTS: Final = "~* &* +@all -@admin -@dangerous +info"
#: The server's default bounds (bytes) on what it keeps for one listener: at once, and for a minute. All tokens that a
#: gateway reads come by one connection.
BUFFERS: Final = (32 << 20, 8 << 20)
#: Words in redis-py's error about a server that is no Redis.
FOREIGN: Final = "Protocol error"
#: Most commands that a refusal names.
NAMED: Final = 6
#: Commands on the keys and channels of Penstock's own, as `_try` takes them.
CORE_COMMANDS: Final = (
    ("HSET", "penstock:task:probe", "v", "1"),
    ("HGETALL", "penstock:task:probe"),
    ("PUBLISH", "penstock:tokens:probe", ""),
    ("SUBSCRIBE", "penstock:tokens:probe"),
)
#: Commands of Celery's remote control and events, and of kombu's tables of queues, in a worker. `{db}`: the database.
CONTROL: Final = (
    ("SADD", "_kombu.binding.penstock:queue:probe", "probe"),
    ("SADD", "_kombu.binding_permanent.penstock:queue:probe", "probe"),
    ("SREM", "_kombu.binding.celery.pidbox", "probe"),
    ("SMEMBERS", "_kombu.binding.reply.celery.pidbox"),
    ("ZADD", "_kombu.binding_deadlines", "0", "probe"),
    ("ZRANGEBYSCORE", "_kombu.binding_deadlines", "0", "0"),
    ("DEL", "penstock@probe.celery.pidbox"),
    ("DEL", "probe.reply.celery.pidbox"),
    ("PUBLISH", "/{db}.celeryev/worker.online", ""),
    ("PSUBSCRIBE", "/{db}.celery.pidbox"),
)
#: Commands of Celery's result backend, which a worker needs for tasks that Celery applications send.
RESULTS: Final = (
    ("GET", "celery-task-meta-probe"),
    ("SETEX", "celery-task-meta-probe", "1", ""),
    ("PUBLISH", "celery-task-meta-probe", ""),
)


class ServerRefused(PenstockError):
    """The broker or the store cannot be used; the message says why, and what to use instead."""


class ServerAway(ServerRefused):
    """It does not answer, and another try may succeed."""


def check_server(
    url: str,
    role: str,
    *,
    must_answer: bool = True,
    control: bool = False,
    results: bool = False,
    trials: Sequence[str] = (),
) -> None:
    """Check a server. Raises ServerRefused, with the reason, if it cannot be used as `role` (broker or store).

    An unreachable server is refused, with ServerAway, only if it must answer. Bad settings that Penstock can run with
    are logged. `control`, `results`: a worker's Celery has its remote control there, its result backend. `trials`:
    commands that its user must be allowed (`producers.admin.roles.Rights.trials`), none of which is run.
    """
    try:
        with closing(connect(url)) as client:
            _may(client, control, trials)
            _may_look(client, role, shown(url))
            _check_epoch(client)
            if results:
                _may_store_results(client, role, shown(url))
            _look_at_memory(client, role, shown(url))
            if role == "store":
                _look_at_buffers(client, shown(url))
    except (ValueError, RedisError, OSError) as error:
        reason = str(error).replace(url, shown(url))
        if FOREIGN in reason:
            reason = f"what listens there is no Redis or Valkey server ({reason})"
        if isinstance(error, ValueError) or trouble(error) in (Trouble.UNUSABLE, Trouble.DENIED, None):
            raise ServerRefused(f"cannot use the {role} at {shown(url)}: {reason}") from error
        if must_answer or isinstance(error, NotPrimary):
            refused = ServerRefused if isinstance(error, NotPrimary) else ServerAway
            raise refused(f"cannot reach the {role} at {shown(url)}: {reason}") from error
        log.warning("the %s at %s does not answer yet: %s", role, shown(url), reason)


def check_files(location: str) -> None:
    """Check where files' content is. Raises ServerRefused, with the reason, for what only an operator can mend.

    A bucket that does not answer is logged.
    """
    try:
        open_blobs(location).check()
    except (ValueError, AwsNotInstalled, OSError) as error:
        if isinstance(error, OSError) and trouble(error) is Trouble.AWAY:
            log.warning("the place of files does not answer yet: %s", error)
            return
        raise ServerRefused(f"cannot use --files-dir: {error}") from error


def _may(client: Redis, control: bool, trials: Sequence[str]) -> None:
    """Check the user's permissions. Raises the server's error, with the command, and the key or channel.

    A script that is denied a command breaks off there, with what it wrote before: a task would end without its row of
    the ledger.
    """
    probe = Call(script(__package__, "probe"), ("penstock:task:probe",), ("penstock:tokens:probe", *trials))
    try:
        _try(client, (*CORE_COMMANDS, *CONTROL) if control else CORE_COMMANDS)
        client.script_load(probe.script.text)
        denied, _ = [client.execute_command(*command) for command in (probe.command, probe.whole)]
        if denied:
            named = ", ".join(" ".join(text(command).split()[:2]) for command in denied[:NAMED])
            more = f" and {len(denied) - NAMED} more" if len(denied) > NAMED else ""
            raise NoPermissionError(f"No permissions for {named}{more}")
    except RedisError as error:
        if trouble(error) is Trouble.DENIED:
            user = text(client.execute_command("ACL", "WHOAMI"))
            raise type(error)(
                f"user {user!r}: {error}. It needs {RIGHTS}, or the least of docs/run/servers.md"
            ) from error
        raise


def _try(client: Redis, commands: Iterable[tuple[str, ...]]) -> None:
    """Have the server check commands of which it runs none: they are queued in a transaction, which is discarded."""
    connection = client.connection_pool.get_connection()
    filled = [[part.replace("{db}", str(connection.db or 0)) for part in command] for command in commands]
    try:
        for batch in ([["MULTI"]], [*filled, ["DISCARD"]]):  # what follows a MULTI that is denied would be run
            connection.send_packed_command(connection.pack_commands(batch))
            for command in batch:
                _read(connection, command)
    except BaseException:
        connection.disconnect()
        raise
    finally:
        client.connection_pool.release(connection)


def _read(connection: Any, command: list[str]) -> None:
    try:
        connection.read_response()
    except NoPermissionError as error:
        raise NoPermissionError(f"{error} ({' '.join(command[:2])})") from error
    except ResponseError as error:
        log.debug("%s may be called, but not now: %s", command[0], error)  # a full server says so, and is used


def _may_look(client: Redis, role: str, where: str) -> None:
    """Warn where the user may not ask who listens: LEASE, LOOK and REAP then go by leases (docs/how/failover.md)."""
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


def _check_epoch(client: Redis) -> None:
    """Raises UnusableServer while a backup is being restored into a store. A broker alone has no epoch."""
    try:
        state = client.hget(keys.EPOCH, "state")
    except NoPermissionError:  # a user of an earlier release's rights
        return
    if text(state or b"") == RESTORING:
        raise UnusableServer("a backup is being restored into it: run `penstock restore` again until it has ended")


def _may_store_results(client: Redis, role: str, where: str) -> None:
    try:
        _try(client, RESULTS)
    except NoPermissionError as error:
        log.warning(
            "the user of the %s at %s may not store Celery's results: tasks that Celery applications send never end "
            "for their senders: %s. It needs %s",
            role,
            where,
            error,
            RIGHTS,
        )


def small_buffers(limits: str) -> str:
    """What is wrong with a server's `client-output-buffer-limit` (as CONFIG GET says it) for listeners; empty if
    nothing is."""
    settings = limits.split()
    for kind, hard, soft, _ in zip(*(settings[k::4] for k in range(4)), strict=False):
        bounds = (hard, soft)
        if kind == "pubsub" and any(
            bound.isdigit() and 0 < int(bound) < least for bound, least in zip(bounds, BUFFERS, strict=True)
        ):
            return f"client-output-buffer-limit pubsub {hard} {soft}: less than the server's default, pubsub 32mb 8mb"
    return ""


def _look_at_buffers(client: Redis, where: str) -> None:
    """Warn where the server cuts listeners early. A user who may not see its settings is not warned."""
    try:
        limits = client.config_get("client-output-buffer-limit")
    except ResponseError as error:
        log.debug("cannot look at the store's settings: %s", error)
        return
    if fault := small_buffers(text(limits.get("client-output-buffer-limit", ""))):
        log.warning(
            "the store at %s has %s. It cuts a gateway that is busy for a moment off from all of its streams, which "
            "then read again what they have missed. Set it to at least the default",
            where,
            fault,
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
