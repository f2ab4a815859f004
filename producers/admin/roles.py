"""The server's users by role, each with the rights that its process needs and no others.

    ROLES: role -> Rights -> rules of an ACL (`docs/run/servers.md` shows them) -> a line of the server's users.acl

A server checks every command of a script as one of the user who calls it. So a script gives nobody more than these
rights; and who may write a key may write it outside our scripts, too.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Final

#: Commands of every connection; those of keys take the rights on keys.
CONNECTION: Final = (
    "hello ping select auth time info acl|whoami client|setinfo client|setname client|tracking multi exec discard "
    "watch unwatch eval evalsha eval_ro evalsha_ro script|load script|exists publish subscribe unsubscribe psubscribe "
    "punsubscribe pubsub|numsub"
)
#: Commands on keys, by Penstock's scripts, by its processes, and by their Celery. None of them names keys that it was
#: not given, as SCAN and KEYS do.
KEYS: Final = (
    "get set setex mget incr incrby decrby del unlink exists expire pexpire persist ttl pttl "
    "hget hset hsetnx hmget hdel hexists hgetall hincrby hkeys hlen hrandfield hscan hvals "
    "lindex llen lmove blmove lpop lpos lpush lrange lrem rpop brpop rpush "
    "sadd scard sismember smembers srem sunion "
    "zadd zcard zcount zincrby zpopmin zrange zrangebyscore zrem zremrangebylex zremrangebyrank zremrangebyscore "
    "zrevrangebyscore zscan zscore "
    "xadd xlen xrange xrevrange xtrim"
)
#: Commands of `penstock backup`, which only reads. SCAN shows the names of all keys.
READER: Final = (
    "hello ping select auth time info acl|whoami client|setinfo client|setname multi exec watch unwatch scan exists "
    "type pttl get hget hgetall hkeys hvals llen lrange smembers xrange zcard zrange zscore"
)
#: Commands of a plain Celery application, which sends tasks and waits for their results.
SENDER: Final = (
    "hello ping select auth client|setinfo client|setname multi exec lpush llen sadd srem smembers "
    "zadd zrem zrangebyscore get mget del subscribe unsubscribe psubscribe punsubscribe"
)


@dataclass(frozen=True, slots=True)
class Rights:
    """`keys` may be read and written, `reads` and `writes` only that; `channels` may be published and listened to. All
    are patterns."""

    keys: str
    reads: str = ""
    channels: str = ""
    commands: str = f"{CONNECTION} {KEYS}"
    writes: str = ""

    def rules(self) -> str:
        """The rules in the syntax of ACLs."""
        return " ".join(
            [
                *(f"~{key}" for key in self.keys.split()),
                *(f"%R~{key}" for key in self.reads.split()),
                *(f"%W~{key}" for key in self.writes.split()),
                *(f"&{channel}" for channel in self.channels.split()),
                *(f"+{command}" for command in self.commands.split()),
            ]
        )

    def trials(self) -> list[str]:
        """Commands that the user may call who has these rights on what is Penstock's own: one on a key or channel of
        each pattern, and each of `KEYS`. Nobody runs them: a server says whether it would (PROBE)."""
        patterns = {
            "SET {} x": f"{self.keys} {self.writes}",
            "GET {}": f"{self.keys} {self.reads}",
            "PUBLISH {} x": self.channels,
        }
        named = [
            command.format(pattern.replace("*", "probe"))
            for command, text in patterns.items()
            for pattern in text.split()
            if pattern.startswith("penstock:")
        ]
        return named + [f"{name.upper()}{' penstock:task:probe' * 4}" for name in KEYS.split()]


#: Keys that a task's way through the store touches, from ADMIT to SETTLE: each process that may end a task needs it.
_TASKS: Final = (
    "penstock:task:* penstock:stream:* penstock:result:* penstock:tasks penstock:tasks:* penstock:tenants "
    "penstock:requests penstock:requests:* "
    "penstock:submitting penstock:deadlines penstock:unsettled penstock:settled penstock:readers penstock:waiting "
    "penstock:waiting:* penstock:drain:* penstock:limits:* penstock:ledger penstock:batch:* penstock:batches "
    "penstock:batches:* penstock:files:notes penstock:replies penstock:replies:* penstock:webhooks:due "
    "penstock:webhooks:row:* penstock:taken:* penstock:lease:* penstock:workers:* penstock:erasing penstock:erased:* "
    "penstock:kept:* penstock:webhooks:waiting penstock:webhooks:waiting:* penstock:shadows penstock:shadows:*"
)
_TASKS_READ: Final = (
    "penstock:webhooks:endpoints penstock:webhooks:endpoints:* penstock:pools penstock:models penstock:adapters "
    "penstock:versions penstock:routing:* penstock:routes penstock:ejected:* penstock:epoch"
)
_TASKS_CHANNELS: Final = "penstock:tokens:* penstock:control:* penstock:alive:* penstock:webhooks:wake"
#: The broker's books of what waits and what workers have.
_DELIVERIES: Final = (
    "penstock:incarnations penstock:inflight:* penstock:delayed:* penstock:sorted:* penstock:turns:* penstock:turn:* "
    "penstock:rested:* penstock:dead penstock:reaped penstock:returned penstock:deliveries penstock:deliveries:tokens "
    "penstock:arrivals penstock:unserved penstock:weights penstock:prefixes penstock:held:* penstock:sqs:*"
)
_QUEUES: Final = "penstock:queue:*"
#: Keys that every process tries at its start (`producers.store.servers`).
_PROBE, _PROBE_CHANNEL = "penstock:task:probe penstock:task:probe:stream", "penstock:tokens:probe"
_IDEMPOTENCY: Final = "penstock:idempotency:* penstock:idempotent:*"
_FILES: Final = "penstock:file:* penstock:files:*"
_SCALING: Final = (
    "penstock:scale:leader penstock:scale:pools penstock:scale:retries penstock:scale:decisions penstock:scale:pins"
)
#: Celery's remote control and events, and kombu's tables of queues.
_CELERY: Final = "_kombu.* *.celery.pidbox*"
_CONTROL_CHANNEL: Final = "/0.celery.pidbox"
_CELERY_CHANNELS: Final = f"{_CONTROL_CHANNEL} /0.celeryev/*"
_RESULTS: Final = "celery-task*"

_WORKER: Final = Rights(
    f"{_TASKS} {_DELIVERIES} {_QUEUES} {_CELERY} {_RESULTS} penstock:models penstock:routes penstock:pools "
    "penstock:versions penstock:routing:* penstock:profiles penstock:ejected:* penstock:blob:* penstock:joins "
    "penstock:metrics:*",
    "penstock:webhooks:endpoints penstock:webhooks:endpoints:* penstock:rollouts penstock:epoch penstock:revoked "
    "penstock:adapters penstock:adapter:*",
    f"{_TASKS_CHANNELS} {_CELERY_CHANNELS} {_RESULTS}",
)
_AUTOSCALER: Final = Rights(
    f"{_SCALING} penstock:drain:* penstock:taken:* penstock:lease:* {_PROBE}",
    f"{_DELIVERIES} {_QUEUES} {_TASKS_READ} penstock:workers:* penstock:profiles penstock:waiting:* penstock:rollouts "
    "penstock:sweeper penstock:swept penstock:submitting penstock:unsettled penstock:settled penstock:waiting "
    "penstock:webhooks:due penstock:webhooks:delivered penstock:webhooks:dead penstock:replies penstock:replies:*",
    f"penstock:control:* penstock:alive:* {_PROBE_CHANNEL}",
)
#: Role -> what its user may do. `workers` is an autoscaler that runs workers itself (`--actuator local`).
ROLES: Final[dict[str, Rights]] = {
    "gateway": Rights(
        f"{_TASKS} {_QUEUES} {_FILES} {_IDEMPOTENCY} penstock:keys penstock:audit penstock:audit:* "
        "penstock:tenants:limits penstock:weights penstock:webhooks:* penstock:usage penstock:usage:* "
        "penstock:scale:retries penstock:scale:pins penstock:swept penstock:sqs:* penstock:dead "
        "penstock:reaped penstock:feedback "
        # Operators change routing and end rollouts over HTTP.
        "penstock:routing:* penstock:models penstock:versions penstock:pools penstock:rollouts penstock:canaries "
        "penstock:canaries:*",
        f"{_DELIVERIES} {_TASKS_READ} {_SCALING} penstock:blob:* penstock:profiles penstock:rollouts penstock:sweeper "
        "penstock:schedules penstock:metrics:*",
        _TASKS_CHANNELS,
    ),
    "worker": _WORKER,
    "sweeper": Rights(
        f"{_TASKS} {_DELIVERIES} {_QUEUES} {_FILES} {_RESULTS} penstock:sweeper penstock:swept penstock:usage "
        "penstock:usage:* penstock:webhooks:* penstock:models penstock:versions penstock:pools penstock:profiles "
        "penstock:blob:* "
        "penstock:schedules penstock:source:* penstock:scale:pools penstock:journal penstock:revoked "
        # Its rollouts change the routing, which the audit log has.
        "penstock:metrics:* penstock:canaries penstock:canaries:* penstock:routing:* penstock:rollouts penstock:audit",
        # A batch's lines run within the limits that its key has by then. The journal has what was changed of these.
        f"{_TASKS_READ} {_SCALING} penstock:feedback penstock:tenants:limits penstock:keys penstock:audit:*",
        f"{_TASKS_CHANNELS} {_RESULTS} {_CONTROL_CHANNEL}",
        # It looks for tokenizers that no model has. SCAN tells the names of all keys.
        f"{CONNECTION} {KEYS} scan",
    ),
    "webhooks": Rights(
        f"penstock:webhooks:* penstock:replies penstock:replies:* penstock:kept:* {_PROBE}",
        "penstock:task:* penstock:stream:* penstock:result:* penstock:batch:* penstock:file:* penstock:epoch",
        f"penstock:webhooks:wake {_PROBE_CHANNEL}",
        writes="penstock:audit penstock:audit:*",
    ),
    "autoscaler": _AUTOSCALER,
    "workers": Rights(f"{_WORKER.keys} {_AUTOSCALER.keys}", f"{_WORKER.reads} {_AUTOSCALER.reads}", _WORKER.channels),
    "sources": Rights(
        f"{_TASKS} {_QUEUES} {_FILES} {_IDEMPOTENCY} penstock:schedules penstock:source:* penstock:inbox:* "
        "penstock:sqs:* penstock:webhooks:delivered* penstock:webhooks:dead* penstock:metrics:sources "
        "penstock:metrics:mark:sources:*",
        f"{_TASKS_READ} {_DELIVERIES} penstock:tenants:limits penstock:keys penstock:blob:*",
        _TASKS_CHANNELS,
    ),
    "celery": Rights(
        f"{_QUEUES} _kombu.binding*",
        # A result's key has the task's random id, and no command here lists keys.
        "celery-task-meta-*",
        "celery-task-meta-*",
        SENDER,
    ),
    "backup": Rights(
        "",
        "penstock:task:* penstock:stream:* penstock:result:* penstock:idempotency:* penstock:idempotent:* "
        "penstock:batch:* penstock:file:* penstock:webhooks:row:* penstock:webhooks:due penstock:webhooks:delivered "
        "penstock:webhooks:dead penstock:webhooks:endpoints penstock:webhooks:secrets penstock:replies:* "
        "penstock:models penstock:versions penstock:routing:* penstock:adapters penstock:adapter:* penstock:routes "
        "penstock:pools penstock:profiles penstock:rollouts penstock:canaries "
        "penstock:schedules penstock:blob:* penstock:inbox:* "
        "penstock:limits:* penstock:erased:* penstock:keys penstock:tenants:limits "
        "penstock:audit penstock:audit:* penstock:ledger penstock:usage penstock:usage:* penstock:epoch penstock:dead "
        "penstock:weights penstock:sqs:* penstock:sorted:* penstock:deliveries:tokens penstock:incarnations "
        f"penstock:revoked penstock:queue:* {_RESULTS}",
        commands=READER,
    ),
    "operator": Rights(f"penstock:* {_RESULTS}", "", f"penstock:* {_CELERY_CHANNELS}", f"{CONNECTION} {KEYS} scan"),
}


def user_line(role: str, password: str) -> str:
    """A line of users.acl. The server compares the password's SHA-256, which cannot be turned back."""
    digest = hashlib.sha256(password.encode()).hexdigest()
    return f"user {role} on sanitize-payload #{digest} resetchannels -@all {ROLES[role].rules()}"
