"""Claims what Celery handed over, many at a time, and starts it in the engine.

The last suspect runs alone: a task whose workers died as often as is allowed but once has company in every crash, and
most of that company is innocent. It waits, unclaimed, until the engine is empty, and nothing is fetched while it runs.
So only a task that kills its worker by itself is ever given up.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import fields, replace
from typing import Any

from engine.errors import EngineClosedError, ErrorText, ModelError, RequestError, TextError
from engine.params import SamplingParams
from engine.request import Pooling, Request
from engine.text import ConfinedTemplate, TemplateSource
from engine.text.tokenizer import EncodedText
from producers.connection.log_throttle import warn_throttled
from producers.connection.script import Call, run_many
from producers.contract import keys
from producers.contract.record import Record, error_json
from producers.contract.task import ASSUMED_OUTPUT, Task
from producers.errors import InvalidTask
from producers.store.protocol import Claimed, claim, is_last_chance, read_claim, release
from workers.connect import LOST, connect
from workers.flow.adapters import AdapterLoader
from workers.flow.deliveries import Deliveries
from workers.flow.finisher import Finisher
from workers.flow.publisher import Publisher, refusal
from workers.flow.stream import read_first, tokens_of
from workers.state.clock import Clock
from workers.state.delivery import Delivery, Keeper, Stage
from workers.state.engine import ServedEngine
from workers.state.served import Served

logger = logging.getLogger(__name__)

BATCH = 64
#: Streams that are read in one go: the first should not wait long for the last.
STREAMS = 16
RETRY_S = 0.2
#: Hands a condemned message to Celery, which decodes it.
Decode = Callable[[], None]
SAMPLING = tuple(field.name for field in fields(SamplingParams))


class Claimer(threading.Thread):
    def __init__(
        self,
        served: Served,
        deliveries: Deliveries,
        clock: Clock,
        publisher: Publisher,
        finisher: Finisher,
        adapters: AdapterLoader,
    ) -> None:
        super().__init__(name="penstock-claimer", daemon=True)
        self._served = served
        self._deliveries = deliveries
        self._clock = clock
        self._publisher = publisher
        self._finisher = finisher
        self._adapters = adapters
        self._redis = connect(served.settings.store)
        self._queue: queue.SimpleQueue[tuple[Delivery, Decode | None] | None] = queue.SimpleQueue()
        self._chat = ChatPrompts(served.files, served.engine.tokenizer, served.engine.max_model_len)
        self._suspects: deque[Delivery] = deque()
        #: Deliveries that came while a suspect ran or waited. They are claimed after it: its death would count against
        #: them, too.
        self._later: deque[tuple[Delivery, Decode | None]] = deque()
        #: Delivery -> the beginning of its published stream, read ahead.
        self._streams: dict[str, list[Any]] = {}
        self._alone = False
        self._stopping = False
        deliveries.on_put_down = self._room

    def submit(self, delivery: Delivery, decode: Decode | None = None) -> None:
        """`decode`: of a condemned message, called only when its task may go on."""
        self._queue.put((delivery, decode))

    def _room(self) -> None:
        """Wakes the thread after a put-down: a suspect may have its turn, or has had it. Any thread."""
        if self._alone:
            self._queue.put(None)

    def stop(self, timeout: float) -> bool:
        self._stopping = True
        self._queue.put(None)
        if self.is_alive():  # a drain may begin before the threads
            self.join(timeout)
        return not self.is_alive()

    def run(self) -> None:
        while not self._stopping:
            batch = [self._queue.get()]
            while len(batch) < BATCH and not self._queue.empty():
                batch.append(self._queue.get())
            todo = [item for item in batch if item is not None and not item[0].put_down]
            if self._alone:
                self._later.extend(todo)
                todo = []
            claims = self._claim([delivery for delivery, _ in todo])
            for start in range(0, len(todo), STREAMS):
                part, answers = todo[start : start + STREAMS], claims[start : start + STREAMS]
                self._read_ahead([delivery for delivery, _ in part], answers)
                for (delivery, decode), claimed in zip(part, answers, strict=True):
                    self._take(delivery, decode, claimed)
            self._streams.clear()
            self._next_suspect()

    def _claim(self, deliveries: list[Delivery]) -> list[Claimed | Exception]:
        """Sends CLAIM until the store answers. An error is one task's own. A repeated CLAIM repeats its answer."""
        while True:
            try:
                answers = run_many(self._redis, [self._call(delivery) for delivery in deliveries])
                return [_read(d.task_id, answer) for d, answer in zip(deliveries, answers, strict=True)]
            except LOST as exc:
                if self._stopping:
                    return [Claimed("lost")] * len(deliveries)
                warn_throttled(logger, "Cannot claim %d tasks, trying again: %s", len(deliveries), exc)
                time.sleep(RETRY_S)

    def _call(self, delivery: Delivery) -> Call:
        return claim(
            delivery.task_id,
            delivery.uuid,
            delivery.incarnation.id,
            self._served.pool,
            plain=delivery.plain.fields if delivery.plain else None,
            condemned=delivery.condemned,
            max_deaths=self._served.settings.max_deaths,
            needs=delivery.plain.level if delivery.plain else 0,
        )

    def _take(
        self, delivery: Delivery, decode: Decode | None, claimed: Claimed | Exception, alone: bool = False
    ) -> None:
        """Acts upon an answer. An unusable record ends its own task, not those behind it."""
        try:
            if isinstance(claimed, Exception):
                raise claimed
            self._act(delivery, decode, claimed, alone)
        except Exception as exc:
            logger.exception("Task %s: its record cannot be used", delivery.task_id, extra=delivery.subject)
            self._finisher.bury(delivery, f"its record cannot be used: {exc}", claimed=True)

    def _act(self, delivery: Delivery, decode: Decode | None, claimed: Claimed, alone: bool) -> None:
        record = claimed.record
        if claimed.answer == "lost":
            self._deliveries.life_is_over(delivery.incarnation)
        elif claimed.answer == "done" and delivery.plain is not None:
            self._finisher.repeat(delivery, claimed.letter)
        elif claimed.answer == "done":
            self._deliveries.done(delivery, claimed.letter, settled=True)
        elif claimed.answer == "erased":
            self._finisher.erase(delivery)
        elif claimed.answer == "busy":
            self._deliveries.give_back(delivery, self._served.settings.retry_after)
        elif claimed.answer == "elsewhere":
            self._deliveries.give_back(delivery, to=claimed.queue)
        elif decode is not None and record is not None and "claims" in record.fields:
            # Others claimed it and lived: it may be decoded, and comes back as a job, to be run or only to be settled.
            delivery.begin(record, record.nexts)
            delivery.keeper = Keeper.CONSUMER
            decode()
        elif claimed.answer == "settle":
            assert record is not None
            delivery.begin(record, record.nexts)
            self._finisher.finish(delivery, record.status)
        else:
            assert record is not None
            self._go(delivery, record, alone)

    def _go(self, delivery: Delivery, record: Record, alone: bool) -> None:
        """Starts a claimed task, unless it is to end at once or to wait until it may run alone."""
        if "end" in record.fields:  # no token would be taken, and its message would come back for ever
            raise ValueError(f"it has an end ({record.fields['end']!r}), and its status is {record.status!r}")
        delivery.begin(record, record.nexts)
        if delivery.traced:
            logger.info("Task %s is claimed", delivery.task_id, extra=delivery.subject)
        if delivery.revoked:
            self._publisher.conclude_revoked(delivery)
        elif delivery.plain and delivery.plain.error:
            self._publisher.conclude(delivery, "failed", delivery.plain.error)
        elif is_last_chance(record, self._served.settings.max_deaths) and not alone:
            how = "Task %s was lost with its worker %d times: it runs alone"
            logger.warning(how, record.id, record.deaths, extra=delivery.subject)
            self._suspects.append(delivery)
            self._stay_alone(True)
        else:
            self._start(delivery)

    def _next_suspect(self) -> None:
        """Gives the next suspect its turn. Suspects that wait hold no claim: they must not be counted dead with it."""
        for delivery in [d for d in self._suspects if d.put_down]:
            self._suspects.remove(delivery)
        self._release([d for d in self._suspects if d.record is not None])
        if self._deliveries.running or self._stopping:
            return
        if self._suspects:
            delivery = self._suspects.popleft()
            (claimed,) = self._claim([delivery])
            self._take(delivery, None, claimed, alone=True)
        elif self._alone:
            self._stay_alone(False)
            while self._later:
                self._queue.put(self._later.popleft())

    def _release(self, deliveries: list[Delivery]) -> None:
        """Sends RELEASE until the store answers."""
        while deliveries and not self._stopping:
            try:
                run_many(self._redis, [release(delivery.task_id, delivery.uuid) for delivery in deliveries])
            except LOST as exc:
                warn_throttled(logger, "Cannot release %d tasks, trying again: %s", len(deliveries), exc)
                time.sleep(RETRY_S)
                continue
            for delivery in deliveries:
                delivery.record = None
            return

    def _stay_alone(self, alone: bool) -> None:
        self._alone = alone
        self._deliveries.ledger.freeze(alone)

    def _start(self, delivery: Delivery) -> None:
        try:
            if not self._submit(delivery):
                return
        except (RequestError, InvalidTask) as exc:
            self._publisher.conclude(delivery, "failed", refusal(delivery, exc))
            return
        except LOST as exc:
            held = "Cannot start task %s, giving it back: %s"
            warn_throttled(logger, held, delivery.task_id, exc, extra=delivery.subject)
            self._finisher.let_go(delivery, self._served.settings.retry_after)
            return
        except EngineClosedError:  # it was lost a moment ago: this worker gives itself up, another runs the task
            self._finisher.let_go(delivery, self._served.settings.retry_after)
            return
        except BaseException as exc:  # a panic in the tokenizer, which is Rust, is no Exception
            logger.exception("Cannot start task %s", delivery.task_id, extra=delivery.subject)
            error = error_json("engine_error", f"The task could not be started: {exc!r}")
            self._publisher.conclude(delivery, "failed", error)
            return
        self._watch_deadline(delivery)
        self._look_again(delivery)

    def _submit(self, delivery: Delivery) -> bool:
        """Hands a task to the engine. False if our life ended meanwhile, or if its adapter is being loaded: then it
        goes back for a moment. Raises the error that keeps it from being started."""
        if not self._has_adapter(delivery):
            return False
        request = self._request(delivery)
        delivery.prompt_ids = request.prompt_ids
        delivery.prompt_tokens = len(request.prompt_ids)
        delivery.selects = request.params.selects
        delivery.course = request.course
        if not self._deliveries.run(delivery):
            return False
        # From here on it is not unloaded. The prompt may have taken long.
        if not self._has_adapter(delivery):
            return False
        if delivery.record is not None and "prompt_tokens" not in delivery.record.fields:
            # A task that runs alone may be a suspect, whose worker dies before it has made a step.
            self._publisher.count(delivery, soon=len(self._deliveries.running) == 1)
        self._served.engine.submit(request, self._publisher.on_event)
        return True

    def _has_adapter(self, delivery: Delivery) -> bool:
        """Whether its adapter is loaded, if it has one; else it goes back for a moment. Raises RequestError if that
        could not be loaded."""
        record = delivery.record
        adapter = None if record is None else record.fields.get("adapter")
        if record is None or adapter is None or self._adapters.ready(adapter, record.model):
            return True
        self._finisher.let_go(delivery, self._adapters.delay(adapter), "adapter_loading")
        return False

    def _look_again(self, delivery: Delivery) -> None:
        """Ends a task that was cancelled or revoked before the engine had it."""
        if delivery.stage is not Stage.RUNNING:
            self._served.engine.abort(delivery.uuid)
        elif delivery.revoked:
            self._publisher.conclude_revoked(delivery)
        elif delivery.cancelled:
            self._publisher.conclude_cancelled(delivery)

    def _watch_deadline(self, delivery: Delivery) -> None:
        """The housekeeper ends it when its deadline passes."""
        deadline = delivery.record.time("deadline") if delivery.record else None
        if deadline is not None:
            delivery.deadline = self._clock.local(deadline)
            self._clock.wake()

    def _request(self, delivery: Delivery) -> Request:
        record = delivery.record
        assert record is not None
        task = Task.parse_json(record.fields.get("task", ""))
        if task.n != record.n:
            raise InvalidTask(f"the record says n = {record.n}, its task n = {task.n}", param="n")
        pooling = None
        if task.kind != "generate":
            prompt_ids, pooling = pooled(task, self._served.engine)
        else:
            delivery.width = task.width
            delivery.max_output = ASSUMED_OUTPUT if task.max_tokens is None else task.max_tokens
            prompt_ids = self._prompt_ids(task, record)
        published = self._published(delivery) if any(delivery.base) else []
        return Request(
            id=delivery.uuid,
            prompt_ids=prompt_ids,
            params=SamplingParams() if pooling else self._params(task, delivery, published),
            pooling=pooling,
            tier=keys.TIERS[task.tier][0],
            salt=task.tenant or "",
            tenant=task.tenant or "",
            weight=self._served.weights.get(task.tenant or "", 1.0),
            adapter=record.fields.get("adapter", ""),
            resume=published,
            taken_over=delivery.start > 1 and "prompt_tokens" in record.fields,
        )

    def _prompt_ids(self, task: Task, record: Record) -> list[int]:
        if task.messages is not None:
            return self._chat.encode(task.messages, record.time("created"))
        prompt, engine = task.prompt, self._served.engine
        return engine.tokenizer.encode(prompt, limit=engine.max_model_len) if isinstance(prompt, str) else list(prompt)

    @staticmethod
    def _params(task: Task, delivery: Delivery, earlier: Sequence[Sequence[int]]) -> SamplingParams:
        """Returns the task's sampling parameters, without results that earlier workers published as a whole. `earlier`:
        the tokens that they published, per choice."""
        published = {"prompt_logprobs"} if delivery.scored else set()
        published |= {"best_of", "beam_width", "length_penalty", "early_stopping"} if any(delivery.base) else set()
        values = ((name, getattr(task, name)) for name in SAMPLING if name not in published)
        sampling = {name: value for name, value in values if value is not None}
        if delivery.record is not None and "max_output" in delivery.record.fields:
            sampling["max_tokens"] = int(delivery.record.fields["max_output"])
        if task.beam_width is not None and any(earlier):
            # They are whole. What ended the longest may have been the room of so many beams, and now there are none.
            sampling["max_tokens"] = longest = max(map(len, earlier))
            sampling["min_tokens"] = min(task.min_tokens, longest)
        return SamplingParams(**sampling)

    def _read_ahead(self, deliveries: Sequence[Delivery], answers: Sequence[Claimed | Exception]) -> None:
        """Reads the streams of tasks that others have begun, in one go: a drained worker hands hundreds over."""
        begun = [
            delivery
            for delivery, claimed in zip(deliveries, answers, strict=True)
            # By its fields alone: a record that is none is to fail its own task, later, and not this thread.
            if isinstance(claimed, Claimed)
            and claimed.answer == "go"
            and claimed.record
            and _begun(claimed.record.fields)
        ]
        with suppress(*LOST):  # then each is read by itself, as those are that cannot be read
            streams = read_first(self._redis, [delivery.task_id for delivery in begun])
            self._streams = {d.uuid: s for d, s in zip(begun, streams, strict=True) if not isinstance(s, Exception)}

    def _published(self, delivery: Delivery) -> list[list[int]]:
        """Returns the tokens that earlier workers published, per choice: this worker continues from there."""
        tokens: list[list[int]] = [[] for _ in delivery.base]
        first = self._streams.pop(delivery.uuid, None)
        for choice, token_id in tokens_of(self._redis, delivery.task_id, first):
            tokens[choice].append(token_id)
        return tokens


def pooled(task: Task, engine: ServedEngine) -> tuple[list[int], Pooling]:
    """The token ids of all texts of a task that generates nothing, one text after another, and what is to be made of
    them. Raises RequestError for a text that the model does not take, unless that fails nothing but itself."""
    kind, texts = task.kind, engine.texts
    if kind == "generate" or engine.kind != kind or texts is None:
        raise RequestError(f"the model cannot {task.kind}", param="model", code="unsupported_model")
    limit: int = engine.max_model_len
    before = texts.text_before(task.prompt_name) if task.kind == "embed" else ""
    ids: list[int] = []
    lengths, seconds, spans, errors = [], [], [], {}
    for at, item in enumerate(task.input):
        text = EncodedText([], None, 0)
        if not item:
            errors[at] = TextError("empty_prompt", "the text is empty")
        elif isinstance(item, str):
            first, second = (before + item, None) if task.query is None else (task.query, item)
            text = texts.encoded(first, task.truncate, second)
        elif task.on_error == "item" and max(item) >= (vocabulary := texts.vocab_size):
            message = f"the text has token id {max(item)}; the model has ids 0 to {vocabulary - 1}"
            errors[at] = TextError("invalid_value", message)
        else:
            text = texts.encoded([*item], task.truncate)
        if len(text.ids) > limit:
            advice = ErrorText.of(
                " has {} tokens; the model takes {}; shorten it, or give truncate: true", text.whole, limit
            )
            if task.on_error == "request":
                raise RequestError(
                    ErrorText.of("{input}[{}]{}", at, advice), param="input", code="context_length_exceeded"
                )
            errors[at] = TextError("context_length_exceeded", f"the text{advice}")
            text = EncodedText([], None, 0)
        elif not text.ids and at not in errors:
            if task.on_error == "request":
                raise RequestError(
                    ErrorText.of("{input}[{}] has no tokens for the model's tokenizer", at),
                    param="input",
                    code="empty_prompt",
                )
            errors[at] = TextError("empty_prompt", "the text has no tokens for the model's tokenizer")
        ids += text.ids
        lengths.append(len(text.ids))
        seconds.append(text.second)
        spans.append(text.spans)
    own = texts.prompt_tokens(before)
    prompt_tokens = tuple(own if isinstance(item, str) else 0 for item in task.input) if own else ()
    pairs = tuple(second or 0 for second in seconds) if any(second is not None for second in seconds) else ()
    alone = task.on_error == "item"
    pooling = Pooling(kind, tuple(lengths), pairs, prompt_tokens, task.dimensions, errors, item_errors=alone)
    if kind != "token_classify":
        return ids, pooling
    aggregation, threshold = task.aggregation_strategy, task.threshold
    return ids, replace(pooling, spans=tuple(spans), aggregation=aggregation, threshold=threshold)


def _begun(fields: Mapping[str, str]) -> bool:
    return "next:" in " ".join(fields)  # some twenty names; a stream that is read in vain does no harm


def _read(task_id: str, answer: Any) -> Claimed | Exception:
    """Reads an answer of CLAIM. A record that is not text is its own task's error, too."""
    if isinstance(answer, Exception):
        return answer
    try:
        return read_claim(task_id, answer)
    except ValueError as exc:
        return exc


class ChatPrompts:
    """Messages to token ids, by the model's own chat template: for tasks that no gateway has rendered.

    `files`: the model's, by name. `limit`: the most tokens of a prompt. The template runs in a process of its own,
    which begins with the first chat.
    """

    def __init__(self, files: Mapping[str, bytes], tokenizer: Any, limit: int) -> None:
        self._files = files
        self._tokenizer = tokenizer
        self._limit = limit
        self._template: ConfinedTemplate | None = None

    def encode(self, messages: Sequence[Mapping[str, Any]], created_ms: int | None) -> list[int]:
        """The prompt of a task. A date in it is that of the task's creation, in UTC, so that every worker that takes
        the task up makes the same prompt.

        Raises RequestError where the template does not take the messages, or cannot be used, or they are too long.
        """
        now = None if created_ms is None else created_ms / 1000
        try:
            text = self._loaded().render(messages, now=now)
        except ModelError as error:
            raise RequestError(str(error), param="model", code="model_broken") from error
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False, limit=self._limit)
        return ids

    def _loaded(self) -> ConfinedTemplate:
        if self._template is None:
            source = TemplateSource.from_bytes(self._files)
            if source is None:
                raise RequestError("the model has no chat template", param="messages", code="unsupported_model")
            self._template = ConfinedTemplate(source)
        return self._template
