"""Queues and the pools that take from each, tiers, ids, and every key and channel of the store.

The scripts spell the same names.

The broker has leases of the same name as the store, and keys of its own: `producers.broker.redis.keys`.
"""

from __future__ import annotations

import hashlib
import json
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from producers.connection.script import parsed
from producers.contract.levels import beside, looked_after, split

#: Service tier -> (rank: lower goes first, kombu priority: the list of its messages).
#: kombu puts a message without a priority into list 0, so `default` is 0.
TIERS: Final[dict[str, tuple[int, int]]] = {"priority": (0, 3), "default": (1, 0), "flex": (2, 6), "batch": (3, 9)}

TASK_NAME: Final = "penstock.generate"
#: Name of a Celery task -> the kind of the tasks that plain Celery sends by it. What Penstock's own senders send has
#: TASK_NAME, whatever its kind.
NAMED_KINDS: Final = {
    TASK_NAME: "generate",
    "penstock.embed": "embed",
    "penstock.rerank": "rerank",
    "penstock.score": "rerank",
    "penstock.classify": "classify",
    "penstock.token_classify": "token_classify",
}
#: Names of Celery tasks that are Penstock's begin with it, also those of later releases.
KINDS: Final = "penstock."
#: The fingerprint of a pool that stands for a version with no other pool, which tasks may wait for.
UNSERVED: Final = "unserved"

TASKS: Final = "penstock:tasks"  # zset: task id -> ms of ADMIT; tasks of clients, for lists of them
REQUESTS: Final = "penstock:requests"  # zset: as TASKS; the last requests of OpenAI's endpoints
TENANTS: Final = "penstock:tenants"  # set: tenants that have an index of their own (`tasks`, `requests`)
SUBMITTING: Final = "penstock:submitting"  # zset: task id -> ms; tasks whose message may not be sent yet
DEADLINES: Final = "penstock:deadlines"  # zset: task id -> ms; unfinished tasks with a deadline or a cancel
UNSETTLED: Final = "penstock:unsettled"  # zset: task id -> ms; final tasks that are not settled
SETTLED: Final = "penstock:settled"  # zset: task id -> ms; settled tasks whose streams are not compacted
REVOKED: Final = "penstock:revoked"  # zset: task id -> ms; until when a plain message of it is cancelled (REVOKE)
ERASING: Final = "penstock:erasing"  # zset: task id -> ms of DELETE; what is not in the store is to be erased, too
SWEEPER: Final = "penstock:sweeper"  # string with a TTL: the sweeper that leads
EPOCH: Final = "penstock:epoch"  # hash: the epoch that began with a restore (`producers.store.epoch`)
RESTORE: Final = "penstock:restore"  # hash: a restore's progress, until it has ended (`producers.backup.restore`)
JOURNAL: Final = "penstock:journal"  # hash: what the journal has of each log (`producers.backup.journal`)
SWEPT: Final = "penstock:swept"  # hash: a sweeper's duty -> how often it was done
WAITING: Final = "penstock:waiting"  # hash: kind, or kind and queue -> tasks that wait (`producers.store.waiting`)
WAITING_TOKENS: Final = "penstock:waiting:tokens"  # hash: kind and queue -> KV tokens that they may need
WAITING_TENANTS: Final = "penstock:waiting:tenants"  # hash: tenant -> tasks that wait, without batches' lines
WAITING_MEMORY: Final = "penstock:waiting:memory"  # hash: the last look at the server's memory (`_memory.lua`)
WAITING_KEYS: Final = "penstock:waiting:keys"  # hash: API key's id -> the same
PARENTS: Final = "penstock:waiting:parents"  # zset: task id -> ms; tasks in chunks that are not tidied up yet
READERS: Final = "penstock:readers"  # zset: task id -> ms; end of its reader lease
SHADOW_SAMPLES: Final = "penstock:shadows"  # list: ids of tasks that are to be copied (`producers.store.shadows`)
SHADOW_COPIES: Final = "penstock:shadows:open"  # zset: task id of a copy -> ms of its ADMIT
MODELS: Final = "penstock:models"  # hash: model name -> card (JSON)
ADAPTERS: Final = "penstock:adapters"  # hash: adapter's name -> what it is (JSON, `producers.store.fleet.adapters`)
VERSIONS: Final = "penstock:versions"  # hash: model@version -> its card (JSON, `producers.store.fleet.cards`)
ROUTES: Final = "penstock:routes"  # hash: model name -> queue of a pool; earlier releases sent tasks there
BATCHES: Final = "penstock:batches"  # zset: batch id -> ms; batches that have not ended, or are yet to be tidied up
BATCH_INDEX: Final = "penstock:batches:index"  # zset: batch id -> 0; all batches; ids sort by time
POOLS: Final = "penstock:pools"  # hash: queue -> {"model", "version", "fingerprint", "announced" (ms)}
JOINS: Final = "penstock:joins"  # string: how often a worker joined those that this server hears (docs/how/failover.md)
PROFILES: Final = "penstock:profiles"  # hash: model@version -> what its workers measured (`producers.contract.profile`)
SCALE_LEADER: Final = "penstock:scale:leader"  # string with a TTL: the autoscaler that leads
SCALE_POOLS: Final = "penstock:scale:pools"  # hash: pool -> its latest decision (JSON, `producers.store.fleet.scaling`)
SCALE_RETRIES: Final = "penstock:scale:retries"  # hash: pool -> unix s; an operator asked for another try
SCALE_PINS: Final = "penstock:scale:pins"  # hash: pool -> JSON; an operator set its number of workers
SCALE_DECISIONS: Final = "penstock:scale:decisions"  # stream: decisions that changed something, the latest 10,000
ROLLOUTS: Final = "penstock:rollouts"  # hash: model -> its rolling update (JSON, `producers.store.fleet.rollouts`)
FEEDBACK: Final = "penstock:feedback"  # stream: scores of finished tasks (`producers.store.feedback`)
CANARIES: Final = "penstock:canaries"  # hash: model -> its last judged rollout (JSON, `producers.store.fleet.canaries`)
CANARY_EVIDENCE: Final = "penstock:canaries:evidence"  # hash: model -> what that has compared (JSON)
METRICS_SOURCES: Final = "penstock:metrics:sources"  # hash: what became of what sources took (`store.measurements`)
FILES_EXPIRING: Final = "penstock:files:expiring"  # zset: file id -> unix s; end of its time to live
FILE_NOTES: Final = "penstock:files:notes"  # zset: file id -> unix s, or 0; blobs that no file stands for
SCHEDULES: Final = "penstock:schedules"  # hash: schedule's name -> unix s of the last time that was dealt with
TENANT_LIMITS: Final = "penstock:tenants:limits"  # hash: tenant -> its limits (JSON, `producers.store.access.tenants`)
API_KEYS: Final = "penstock:keys"  # hash: id -> key (JSON, `producers.store.access.api_keys`)
AUDIT: Final = "penstock:audit"  # stream: changes of keys, endpoints, routing (`producers.store.access.audit`)
AUDIT_ENDPOINTS: Final = "penstock:audit:endpoints"  # stream: the same of webhook endpoints, which tenants change
LEDGER: Final = "penstock:ledger"  # stream: a row for each final task (`producers.store.usage.ledger`)
USAGE: Final = "penstock:usage:sums"  # zset: hour or day with sums of the ledger -> unix s of its beginning
USAGE_UNSPLIT: Final = "penstock:usage"  # the same of those that earlier releases wrote, of all tenants in one hash
USAGE_FOLDED: Final = "penstock:usage:folded"  # string: id of the last row that is in the sums
WEBHOOK_ENDPOINTS: Final = "penstock:webhooks:endpoints"  # hash: id -> endpoint (JSON), see `producers.store.outbox`
ENDPOINTS_INDEXED: Final = "penstock:webhooks:endpoints:indexed"  # string: how many endpoints are in `endpoints_of`
WEBHOOK_SECRETS: Final = "penstock:webhooks:secrets"  # hash: tenant -> secrets of its tasks' own webhooks (JSON)
WEBHOOKS_DUE: Final = "penstock:webhooks:due"  # zset: row's name -> ms; a taken row is due again when its lease ends
WEBHOOKS_DELIVERED: Final = "penstock:webhooks:delivered"  # zset: row's name -> ms
WEBHOOKS_DEAD: Final = "penstock:webhooks:dead"  # zset: row's name -> ms
WEBHOOKS_WAITING: Final = "penstock:webhooks:waiting"  # hash: tenant -> webhooks that are due
REPLIES: Final = "penstock:replies"  # set: sources of which replies are due, or were lately (`replies`)
WEBHOOKS_WAKE: Final = (
    "penstock:webhooks:wake"  # channel: a row is due now; a message names a reply's source, or is empty
)


def tier_of(priority: int | None) -> str:
    """The tier of a Celery priority: that of the highest step which is not above it, as kombu chooses a list."""
    step = max(step for _, step in TIERS.values() if step <= max(0, priority or 0))
    return next(tier for tier, (_, priority_step) in TIERS.items() if priority_step == step)


def metrics(model: str) -> str:
    """Hash: what the model's tasks and engines have taken (`producers.store.measurements`)."""
    return f"penstock:metrics:model:{model}"


def metrics_mark(source: str) -> str:
    """String: the last increments of a worker's process, or of the ledger, that are in those hashes."""
    return f"penstock:metrics:mark:{source}"


def shadow_pairs(model: str) -> str:
    """Stream: copies of the model's tasks, compared with these (`producers.store.shadows`)."""
    return f"penstock:shadows:pairs:{model}"


def shadow_drops(model: str) -> str:
    """Hash with a TTL: why tasks were not copied, or copies not compared -> how many."""
    return f"penstock:shadows:drops:{model}"


def adapter(version: str) -> str:
    """Hash: the files of an adapter in pieces, by `<file>:<number>`."""
    return f"penstock:adapter:{version}"


def task(task_id: str) -> str:
    """Hash: the record."""
    return f"penstock:task:{task_id}"


def tasks(tenant: str) -> str:
    """Zset: as TASKS, of one tenant."""
    return f"penstock:tasks:{tenant}"


def requests(tenant: str) -> str:
    """Zset: as REQUESTS, of one tenant."""
    return f"penstock:requests:{tenant}"


def stream(task_id: str) -> str:
    """Stream: one entry a token, then the terminal entry. An entry's id is its position + 1."""
    return f"penstock:stream:{task_id}"


def result(task_id: str) -> str:
    """Hash: the compacted stream; block number -> entries (`producers.contract.stream`)."""
    return f"penstock:result:{task_id}"


def erased(task_id: str) -> str:
    """String with a TTL: a task with this id was deleted, and is not made again. The value: that call's nonce."""
    return f"penstock:erased:{task_id}"


def celery_result(task_id: str) -> str:
    """String with a TTL: the result of a plain Celery task, as Celery's result backend has it."""
    return f"celery-task-meta-{task_id}"


def channel(task_id: str) -> str:
    """Channel: new entries of the stream; each message is `[position, entry, ...]`."""
    return f"penstock:tokens:{task_id}"


def process_channel(process: str) -> str:
    """Channel: what is published of the tasks that a process follows, many in a message (`_followers.lua`). No task's
    id begins with `@`."""
    return f"{channel('@')}{process}"


def control(incarnation: str) -> str:
    """Channel: commands to one worker, such as `cancel <task id>` and `drain`."""
    return f"penstock:control:{incarnation}"


def alive(incarnation: str) -> str:
    """Channel: nothing is published; a worker listens to its own for as long as its process lives."""
    return f"penstock:alive:{incarnation}"


def lease(incarnation: str) -> str:
    """String with a TTL: a worker incarnation's lease. The value: its state (JSON), `listens` and `joins` by LEASE."""
    return f"penstock:lease:{incarnation}"


def idempotency(digest: str) -> str:
    """Hash with a TTL: what an Idempotency-Key stands for (`producers.store.idempotency`)."""
    return f"penstock:idempotency:{digest}"


def idempotency_keys(tenant: str) -> str:
    """Hash with a TTL: hour (unix time / 3600 s) -> Idempotency-Keys of a tenant that began in it."""
    return f"penstock:idempotent:{tenant}"


def blob(sha256: str) -> str:
    """String: a tokenizer file, by its SHA-256 (hex)."""
    return f"penstock:blob:{sha256}"


def file(file_id: str) -> str:
    """Hash: a file's record (`producers.store.files`)."""
    return f"penstock:file:{file_id}"


def files(tenant: str, purpose: str = "all") -> str:
    """Sorted set: ids of a tenant's files of one purpose, or of all; ids sort by time."""
    return f"penstock:files:{purpose}:{tenant}"


def file_bytes(tenant: str) -> str:
    """String with a TTL: bytes of all of a tenant's files; absent until they are counted (`producers.store.files`)."""
    return f"penstock:files:bytes:{tenant}"


def uploads(tenant: str) -> str:
    """Hash with a TTL: upload's name -> bytes that are reserved for it, and until when (unix s)."""
    return f"penstock:files:uploads:{tenant}"


def endpoints_of(tenant: str | None) -> str:
    """Set: ids of the webhook endpoints of a tenant, or of those without one."""
    return f"{WEBHOOK_ENDPOINTS}:of:{tenant or ''}"


def webhook_row(name: str) -> str:
    """Hash: one delivery of an event (`producers.store.outbox`)."""
    return f"penstock:webhooks:row:{name}"


def webhooks_ended(state: str, tenant: str) -> str:
    """Zset with a TTL: as WEBHOOKS_DELIVERED (`delivered`) or WEBHOOKS_DEAD (`dead`), of one tenant."""
    return f"penstock:webhooks:{state}:{tenant}"


def replies(source: str) -> str:
    """Zset: row's name -> ms; replies of a source that are due, as WEBHOOKS_DUE has webhooks."""
    return f"penstock:replies:{source}"


def source_leader(source: str) -> str:
    """String with a TTL: the process that leads a source of which one alone may run."""
    return f"penstock:source:{source}:leader"


def kept(tenant: str) -> str:
    """Hash with a TTL: bytes of a tenant's tasks in the store; '' is the tenant of those without (`_kept.lua`)."""
    return f"penstock:kept:{tenant}"


def account(name: str) -> str:
    """Hash: the counts of an API key with limits, by its id, or of `tenant:<name>`
    (`producers.store.usage.limits`)."""
    return f"penstock:limits:{name}"


def usage(bucket: str, tenant: str) -> str:
    """Hash: a tenant's sums of an hour or a day, `hour:<unix s>` or `day:<unix s>` (`producers.store.usage.ledger`)."""
    return f"penstock:usage:sums:{bucket}:{tenant}"


def usage_tenants(bucket: str) -> str:
    """Set: the tenants that have sums of an hour or a day."""
    return f"penstock:usage:tenants:{bucket}"


def usage_unsplit(bucket: str) -> str:
    """Hash: sums of all tenants, as earlier releases wrote them."""
    return f"penstock:usage:{bucket}"


def batch(batch_id: str) -> str:
    """Hash: a batch (`producers.store.batches`)."""
    return f"penstock:batch:{batch_id}"


def batch_index(tenant: str) -> str:
    """Zset: as BATCH_INDEX, of one tenant."""
    return f"penstock:batches:index:{tenant}"


def open_batches(tenant: str) -> str:
    """Set: a tenant's batches that have not ended, or are yet to be tidied up; '' is the tenant of those without."""
    return f"penstock:batches:open:{tenant}"


def batch_refused(batch_id: str) -> str:
    """Hash: number of a line with a bad body -> its error (JSON), until it is written."""
    return f"penstock:batch:{batch_id}:refused"


def batch_parts(batch_id: str) -> str:
    """Hash: number of a line -> parts of files that begin with it (JSON, `producers.store.batches.Part`)."""
    return f"penstock:batch:{batch_id}:parts"


def batch_begun(batch_id: str) -> str:
    """Set: names of all blobs that were begun as parts, to be removed at the batch's end."""
    return f"penstock:batch:{batch_id}:begun"


def inbox(location: str) -> str:
    """Hash: batch id -> object of a bucket's or folder's inbox that is open (JSON, `producers.store.inbox`)."""
    return f"penstock:inbox:{location}"


def inbox_known(digest: str) -> str:
    """Hash with a TTL: stamp -> batch id, of the objects of one name; `newest` -> batch id of the last one."""
    return f"penstock:inbox:known:{digest}"


def inbox_lease(batch_id: str) -> str:
    """String with a TTL: the process that works on an object."""
    return f"penstock:inbox:lease:{batch_id}"


def drain(queue: str) -> str:
    """Hash with a TTL: how fast a queue's tasks are started (`producers.store.waiting`)."""
    return f"penstock:drain:{queue}"


def workers(queue: str) -> str:
    """Set with a TTL: incarnations of a pool that neither drain nor are held back; without a lease none counts."""
    return f"penstock:workers:{queue}"


def ejected(queue: str) -> str:
    """Set with a TTL: incarnations of a pool that breakers hold back; one without a lease does not count."""
    return f"penstock:ejected:{queue}"


def pool_queue(model: str, version: str, fingerprint: str) -> str:
    """The queue of one pool (a model version served by one kind of engine), for what was begun there."""
    return f"{version_queue(model, version)}.{fingerprint}"


def routing(model: str) -> str:
    """Hash: which version of a model a new task goes to (`producers.store.fleet.routing`)."""
    return f"penstock:routing:{model}"


def canary_log(model: str) -> str:
    """Stream: decisions of a model's judged rollouts, and what they saw (`producers.store.fleet.canaries`)."""
    return f"penstock:canaries:log:{model}"


def version_queue(model: str, version: str) -> str:
    """The queue of a model version, which all of its pools take from: clients send tasks here."""
    return f"penstock:queue:{model}@{version}"


def model_queue(model: str) -> str:
    """The queue for plain Celery senders, who know a model by its name alone."""
    return f"penstock:queue:{model}"


@dataclass(frozen=True, slots=True)
class Pool:
    """Workers that compute alike: a model version served by one kind of engine."""

    model: str
    version: str
    fingerprint: str

    @property
    def queue(self) -> str:
        """Its own queue."""
        return pool_queue(self.model, self.version, self.fingerprint)

    @property
    def version_queue(self) -> str:
        """The queue of all pools of its version."""
        return version_queue(self.model, self.version)

    @property
    def queues(self) -> list[str]:
        """The queues that its workers take from. In a tier the first goes first: tasks that only a later release can
        do go before others."""
        version, *later = beside(self.version_queue)
        return [*beside(self.queue), *later[::-1], version, model_queue(self.model)]


def takers_of(pools: Mapping[str, str], cards: Mapping[str, str] | None = None) -> dict[str, list[str]]:
    """Every queue, with the own queues of the pools that take from it; the pools' own come first.

    `pools` and `cards`: JSON by queue and by model, as the store has them. A model's queues are there before its pools.
    A card that cannot be read names no version: its model has the queue of plain senders alone.
    """
    takers = {queue: [pool] for pool in pools for queue in looked_after(pool)}
    for name, card in (cards or {}).items():
        takers[model_queue(name)] = []
        if version := parsed(card).get("version"):
            takers |= {queue: [] for queue in looked_after(version_queue(name, str(version)))}
    for queue, pool in pools.items():
        for version in looked_after(version_queue_of(pool)):
            takers.setdefault(version, []).append(queue)
        takers.setdefault(model_queue(json.loads(pool)["model"]), []).append(queue)
    return takers


def takes_from(pool: str, queue: str) -> bool:
    """Whether workers of the pool with this own queue take from a pool's own queue, or a version's; from one beside it
    only those whose release can do what its tasks need."""
    base, _ = split(queue)
    return pool == base or pool.startswith(f"{base}.")


def version_queue_of(pool: str) -> str:
    """The queue of the version that a pool serves (JSON)."""
    fields = json.loads(pool)
    return version_queue(fields["model"], fields["version"])


def timed_id(prefix: str, ms: int, seed: str | None = None) -> str:
    """A file's or batch's id: `file-` or `batch_`, say, and 32 hexadecimal digits. It sorts by `ms`, the unix time.

    With a seed it is a function of time and seed, so that who makes an object twice gives it the same id.
    """
    digits = secrets.token_hex(10) if seed is None else hashlib.sha256(f"{prefix}:{seed}".encode()).hexdigest()[:20]
    return f"{prefix}{ms:012x}{digits}"
