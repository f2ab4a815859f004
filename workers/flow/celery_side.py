"""The running batch as Celery's pool, its requests and remote control know it.

They run, acknowledge, reject or revoke a delivery:

intake, of a task in which Celery has no part -> run_native -> claimer
kombu's callbacks -> Request -> EnginePool -> take_job, run -> claimer
                                           -> take_beside -> a thread of the pool's own
                 -> of an unknown kind -> defer_to_later_release -> the queue of the next level

Messages of plain Celery senders (`app.send_task("penstock.generate", kwargs={...})`, or the name of another kind) have
no record before they are claimed. `plain_fields` makes its fields from the message's keyword arguments.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final

from celery import signals
from celery.worker import state

from producers.broker.base import Consumer
from producers.connection.log_throttle import warn_throttled
from producers.contract import keys, levels, model_fit
from producers.contract.message import id_of, is_native, is_plain
from producers.contract.record import error_json, trace_fields
from producers.contract.task import Task
from producers.errors import InvalidTask, SecretUnreadable, shown
from workers.breaker import Breaker
from workers.flow.claimer import Claimer, Decode
from workers.flow.deliveries import Deliveries
from workers.flow.finisher import Finisher
from workers.flow.monitors import Monitors
from workers.flow.publisher import Publisher
from workers.state.clock import Clock
from workers.state.delivery import Delivery, Job, Keeper, Native, Plain
from workers.state.served import Served

logger = logging.getLogger(__name__)

#: Between the results that a chord makes one prompt of.
PARAGRAPH: Final = "\n\n"
#: Signals of Celery's that tell of a task that begins or ends.
TOLD: Final = (
    *(signals.task_received, signals.task_prerun, signals.task_postrun),
    *(signals.task_success, signals.task_failure),
)


@dataclass(slots=True)
class CelerySide:
    """Deliveries are named by UUID, which is Celery's tag. One that is not ours any more is skipped."""

    served: Served
    deliveries: Deliveries
    clock: Clock
    claimer: Claimer
    publisher: Publisher
    finisher: Finisher
    broker: Consumer
    monitors: Monitors
    own_breaker: Breaker
    close: Callable[[], None] = lambda: None
    """Called when Celery's worker is about to stop: nothing more is to be fetched for it."""
    stop: Callable[[bool], None] = lambda at_once: None
    """Called when it stops; returns once all is handed back."""

    # ---- the pool -------------------------------------------------------------------------------------------------

    def take_job(self, uuid: str, job: Job) -> Delivery | None:
        """Takes a job that Celery wants run in the engine; None if its delivery is not ours any more."""
        delivery = self.deliveries.by_uuid.get(uuid)
        if delivery is not None:
            delivery.job = job
            self._keep_until_settled(delivery, job.headers, job.headers)
        return delivery

    def run(self, delivery: Delivery) -> None:
        """Begins a job that Celery calls active."""
        self.claimer.submit(delivery)

    def take_beside(self, uuid: str) -> Delivery | None:
        """Takes a task that Celery runs on a thread; None if its delivery is not ours any more."""
        delivery = self.deliveries.by_uuid.get(uuid)
        if delivery is not None:
            delivery.keeper = Keeper.THREAD
        return delivery

    def fail_beside(self, delivery: Delivery, reason: str) -> None:
        """Keeps a task around which Celery failed on a thread as a dead letter."""
        self.deliveries.done(delivery, reason)

    @property
    def in_flight(self) -> int:
        """Deliveries in this worker's hands."""
        return len(self.deliveries)

    @property
    def capacity(self) -> int:
        """The most sequences that run at once."""
        return int(self.served.engine.max_num_seqs)

    # ---- remote control -------------------------------------------------------------------------------------------

    def scheduled(self, limit: int) -> list[bytes]:
        """Returns at most `limit` messages that wait for their countdown, the soonest first."""
        return self.broker.scheduled(limit)

    def breaker(self) -> dict[str, Any]:
        return self.own_breaker.to_dict()

    # ---- the consumer ---------------------------------------------------------------------------------------------

    def ack(self, uuid: str) -> None:
        """Handles Celery's acknowledgement: an engine task's message stays until it is settled, any other goes now."""
        delivery = self.deliveries.by_uuid.get(uuid)
        if delivery is not None and delivery.keeper is not Keeper.FLOW:
            self.deliveries.done(delivery)

    def reject(self, uuid: str, requeue: bool) -> None:
        """Handles Celery's rejection of an unknown or undecodable task (kept as a dead letter), or of one to be run
        elsewhere."""
        delivery = self.deliveries.by_uuid.get(uuid)
        if delivery is None or delivery.keeper is Keeper.FLOW:
            return
        if requeue:
            self.deliveries.give_back(delivery)
        else:
            self.finisher.bury(delivery, "rejected: unknown task, or arguments that cannot be decoded")

    def defer_to_later_release(self, uuid: str, kind: str) -> None:
        """Moves a message of an unknown kind (`penstock.*`) to the queue that only workers of later releases read.

        On SQS, or if its id cannot be part of a key, nobody could end it there. Then it fails at once and becomes a
        dead letter."""
        delivery = self.deliveries.by_uuid.get(uuid)
        if delivery is None:
            return
        if self.broker.capabilities.prunes and id_of({"id": delivery.task_id}):
            warn_throttled(logger, "Put aside for a later release: message %s, of kind %r", delivery.task_id, kind)
            home = self.served.pool.version_queue
            self.deliveries.give_back(delivery, to=levels.queue_of(home, levels.LEVEL + 1))
        else:
            self.finisher.bury(delivery, f"its kind {kind!r} is of a later release, or of none", code="release_missing")

    def forget(self, uuid: str) -> None:
        """Gives a message back that the consumer had not yet handed to the pool when its channel closed."""
        delivery = self.deliveries.by_uuid.get(uuid)
        if delivery is not None and delivery.keeper is Keeper.CONSUMER:
            self.finisher.let_go(delivery)

    def refuse(self, uuid: str, reason: str) -> None:
        """Keeps a message that cannot be decoded as a dead letter."""
        delivery = self.deliveries.by_uuid.get(uuid)
        if delivery is not None:
            self.finisher.bury(delivery, reason)

    def revoke(self, request: Any, expired: bool) -> None:
        """Follows Celery's revocation in record and engine; Celery has told the result backend."""
        delivery = self.deliveries.by_uuid.get(request.message.delivery_tag)
        if delivery is None or delivery.put_down:
            return
        delivery.revoked = "failed" if expired else "cancelled"
        if delivery.keeper is not Keeper.FLOW:  # before the pool had it: it has no job, and needs none
            self._keep_until_settled(delivery, request.request_dict, request.request_dict)
            self.claimer.submit(delivery)
        elif delivery.uuid in self.deliveries.running:
            self.publisher.conclude_revoked(delivery)

    # ---- the intake -----------------------------------------------------------------------------------------------

    @staticmethod
    def is_apart(payload: Mapping[str, Any]) -> bool:
        """Whether Celery has no part in a message's task: neither by what the message says, nor because it was revoked,
        nor because somebody receives Celery's signals."""
        return (
            is_native(payload)
            and payload["headers"]["id"] not in state.revoked
            and not any(signal.receivers for signal in TOLD)
        )

    def run_native(self, delivery: Delivery, native: Native) -> None:
        """Begins a task in which Celery has no part. The intake's thread alone."""
        delivery.native, delivery.keeper = native, Keeper.FLOW
        self.monitors.begun(delivery)
        self.claimer.submit(delivery)

    def condemn(self, delivery: Delivery, headers: dict[str, Any], decode: Decode) -> None:
        """Claims a message whose workers died before they could claim it.

        `decode` gives it to Celery, once a worker has claimed it and lived.
        """
        if headers["task"] in keys.NAMED_KINDS:
            self._keep_until_settled(delivery, headers, None)
            self.claimer.submit(delivery, decode)
        else:
            self.finisher.bury(delivery, "its workers died before they could run it")

    def unreadable(self, delivery: Delivery, reason: str) -> None:
        """Keep a message of which only the id can be read as a dead letter."""
        self.finisher.bury(delivery, reason)

    def _keep_until_settled(
        self, delivery: Delivery, headers: dict[str, Any], arguments: dict[str, Any] | None
    ) -> None:
        """Keep the message until its task is settled, whatever Celery says of it. `arguments`: see `plain_fields`."""
        delivery.keeper = Keeper.FLOW
        if is_plain(headers):
            delivery.plain = plain_fields(self.served, self.clock.server_ms(), headers, arguments)


def plain_fields(served: Served, now_ms: int, headers: dict[str, Any], arguments: dict[str, Any] | None) -> Plain:
    """`now_ms`: by the store's clock. `arguments` holds `args` and `kwargs`; None where they must not be decoded."""
    fields: dict[str, str | int] = {
        "model": served.model,
        "queue": served.pool.version_queue,
        "tier": "default",
        "n": 1,
        "task": "{}",
        "nonce": "",
        **trace_fields(headers.get("traceparent")),
    }
    if arguments is None:
        return Plain(fields)
    kwargs = arguments.get("kwargs") or {}
    try:
        kwargs = _with_kind(headers.get("task"), arguments.get("args") or (), kwargs)
        task = _resolved(served, {"model": served.model, "tier": _tier(headers), **kwargs})
        webhook = {} if task.webhook is None else task.webhook.stored()
    except (InvalidTask, SecretUnreadable) as exc:
        # A webhook may hold a secret, which is not shown with the record.
        fields["task"] = json.dumps({name: value for name, value in kwargs.items() if name != "webhook"}, default=str)
        code, param = (exc.code, exc.param) if isinstance(exc, InvalidTask) else ("secret_unreadable", "webhook.secret")
        return Plain(fields, error_json(code, str(exc), param), levels.LEVEL + 1)  # a later release may take it
    fields |= {"task": task.to_json(), "tier": task.tier, "n": task.n, **webhook}
    if task.version is not None:
        fields["alias"] = fields["named"] = task.version
    if task.ttl is not None:
        fields["ttl"] = task.ttl
    deadline = _deadline_ms(now_ms, headers, task)
    if deadline is not None:
        fields["deadline"] = deadline
    if task.level:
        fields["level"] = task.level
    return Plain(fields, level=task.level)


def _resolved(served: Served, fields: dict[str, Any]) -> Task:
    """Parses and resolves the task as its record will have it. Raises InvalidTask."""
    task = Task.parse(fields)
    if task.model != served.model:
        raise InvalidTask(f"this queue serves model {served.model!r}, not {task.model!r}", param="model")
    if task.order_key is not None:
        raise InvalidTask("messages of plain Celery keep no order; leave order_key out", param="order_key")
    task = task.resolved(served.card)
    model_fit.check_at_once(task, served.card)
    return task


def _with_kind(name: str | None, args: Sequence[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Returns the fields of the task that was sent by this name (`keys.NAMED_KINDS`), with its one positional argument.

    Raises InvalidTask.
    """
    kind = keys.NAMED_KINDS.get(name or "", "generate")
    if kind == "generate":
        return _with_prompt(args, kwargs)
    if kwargs.get("kind", kind) != kind:
        message = f"kind is {shown(kwargs['kind'])}; a task that is sent as {name} is of kind {kind}: leave it out"
        raise InvalidTask(message, param="kind")
    if not args:
        return {**kwargs, "kind": kind}
    if len(args) > 1:
        raise InvalidTask(f"{name} has {len(args)} positional arguments; it takes one, the texts. Name the others")
    if kwargs.get("input") is not None:
        raise InvalidTask(_TWICE.format("input"), param="input")
    return {**kwargs, "kind": kind, "input": _texts_of(args[0])}


def _texts_of(value: Any) -> Any:
    """Returns the texts in a parent's result: its text, or that of each of several. Returns any other value as it is:
    texts, lists of token ids, or what a task refuses."""
    if isinstance(value, list):
        return [_prompt_of(item) if isinstance(item, Mapping) else item for item in value]
    return value.get("text") if isinstance(value, Mapping) else value


#: The error of a field that has two values.
_TWICE: Final = (
    "{} is given twice: as a keyword, and as a positional argument, which is where a chain or chord puts the result "
    "before; leave one out, or make the signature immutable (.si)"
)


def _with_prompt(args: Sequence[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Returns the fields with the one positional argument, where a chain or chord puts a parent's result, as the
    prompt. If the task names messages, it becomes the last one, a user's.

    Raises InvalidTask where there are more, or a prompt is named as well.
    """
    if not args:
        return kwargs
    if len(args) > 1:
        raise InvalidTask(
            f"penstock.generate has {len(args)} positional arguments; it takes one, the prompt. Name the others: "
            "max_tokens=20, ..."
        )
    if kwargs.get("prompt") is not None:
        raise InvalidTask(_TWICE.format("prompt"), param="prompt")
    if isinstance(messages := kwargs.get("messages"), list):
        return {**kwargs, "messages": [*messages, {"role": "user", "content": _prompt_of(args[0])}]}
    return {**kwargs, "prompt": _prompt_of(args[0])}


def _prompt_of(value: Any) -> Any:
    """Returns the prompt in a parent's result: a result dictionary's text, or the texts of several results as
    paragraphs. Returns any other value as it is: text, token ids, or what a task refuses."""
    if isinstance(value, Mapping):
        return value.get("text")
    texts = [_prompt_of(item) for item in value] if isinstance(value, list) else []
    return PARAGRAPH.join(texts) if texts and all(isinstance(text, str) for text in texts) else value


def _tier(headers: dict[str, Any]) -> str:
    """Returns the tier of the list that the message's Celery priority chose."""
    return keys.tier_of((headers.get("delivery_info") or {}).get("priority"))


def _deadline_ms(now_ms: int, headers: dict[str, Any], task: Task) -> int | None:
    """Returns the deadline (ms): the earlier of the task's timeout, from its claim, and Celery's `expires`."""
    deadlines = []
    if task.timeout is not None:
        deadlines.append(now_ms + int(task.timeout * 1000))
    expires = headers.get("expires")
    if isinstance(expires, str):
        at = datetime.fromisoformat(expires)
        deadlines.append(int((at if at.tzinfo else at.replace(tzinfo=UTC)).timestamp() * 1000))
    return min(deadlines, default=None)
