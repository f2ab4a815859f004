"""A task's stream: its events, also as the blocks of a compacted stream, and the result that they sum to.

Entries are stored in `penstock:stream:<id>` and sent over `penstock:tokens:<id>`. An entry is JSON, in the stream's
field `e`; its position is its entry id less one (`1-0` is position 0).

- token: `[choice, index, token id, "text"]`, then optionally the logprobs `[logprob, [[token id, logprob], ...]]` or
  null, then on a choice's last token its finish reason. The text may be empty: part of a character is held back.
- prompt: `{"prompt": first index, "token_ids": [...], "logprobs": [...]}`, before the first token, in pieces of at most
  512 tokens. `logprobs` has an element as above for each token, null for the prompt's first.
- terminal: `{"end": status, "reasons": [...], "usage": {...}, "error": null | {...}}`; nothing follows it. Of a
  completed task that generates nothing it has `"result"` too: `{"rows": texts, "width": numbers of each, "data": ...}`,
  the data all rows' fp32 numbers, little-endian, in base64. Texts that had none have their errors by number, and no
  numbers there: `"errors": {"7": {"code": ..., "message": ...}}`. Of labelled parts of texts it has `"counts"`, the
  parts of each text, and `"labels"`; a part has 4 numbers: its label's index there, its score, its start and its end.
- any other object is of a kind that a later version adds; readers skip it.

A channel message is `[position of the first entry, entry, ...]`. A process's channel has such messages of many tasks
(`producers/store/scripts/_followers.lua`).

A compacted stream is the hash `penstock:result:<id>` of blocks: its field k holds the entries of positions k * 1000 to
k * 1000 + 999, a line each, compressed (zlib, RFC 1950).
"""

from __future__ import annotations

import base64
import json
import sys
import zlib
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import chain
from json.encoder import encode_basestring
from typing import Any, Final, TypeAlias

from engine.errors import TextError
from engine.labels import Entity as Entity
from producers.contract.record import Record, read_error
from producers.errors import TaskFailed

#: Most tokens of a prompt in one entry.
PROMPT_PIECE: Final = 512
#: Entries in a block of a compacted stream; readers read one block at a time.
BLOCK: Final = 1000
#: Made once: `json.dumps` makes one for each call that is given separators.
_ENCODER: Final = json.JSONEncoder(separators=(",", ":"))
#: Parses JSON that nothing follows, in half the time of `json.loads`.
_SCAN: Final = json.JSONDecoder().raw_decode
#: zlib's compression level; higher ones hardly make streams smaller.
LEVEL: Final = 6
TIMES = ("created", "queued", "started", "first", "finished")

#: Encodes a string as JSON with the fewest escapes.
quote: Final = encode_basestring

#: A token's logprob, then the alternatives: (logprob, ((token id, logprob), ...)).
Logprobs = tuple[float, tuple[tuple[int, float], ...]]


@dataclass(frozen=True, slots=True)
class Token:
    """One token of one choice."""

    position: int
    choice: int
    index: int
    token_id: int
    text: str
    logprobs: Logprobs | None = None
    finish_reason: str | None = None


@dataclass(frozen=True, slots=True)
class End:
    """The terminal entry."""

    position: int
    status: str
    reasons: tuple[str | None, ...]
    usage: dict[str, int]
    error: dict[str, Any] | None = None
    result: dict[str, Any] | None = None
    """What a task that generates nothing made of its texts, as stored; see `rows_of`."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """Log probabilities of a part of the prompt, one a token given those before it; None for the first token."""

    position: int
    first: int
    """Index in the prompt of the part's first token."""
    token_ids: tuple[int, ...]
    logprobs: tuple[Logprobs | None, ...]


@dataclass(frozen=True, slots=True)
class Chunk:
    """A chunk of a task's texts has completed (`producers.store.chunks`). Chunks come in order."""

    position: int
    number: int
    offset: int
    """Number of its first text, from 0."""
    texts: int
    task_id: str
    """The task whose terminal entry has the texts' rows."""


Event = Token | Prompt | Chunk | End


def encode_token(
    choice: int,
    index: int,
    token_id: int,
    text: str,
    logprobs: Logprobs | None = None,
    finish_reason: str | None = None,
) -> str:
    """A token's entry as JSON. Built by hand, five times faster than `json.dumps`, since it runs once a token."""
    head = f"[{choice},{index},{token_id},{quote(text)}"
    if logprobs is None and finish_reason is None:
        return head + "]"
    shown = "null" if logprobs is None else _ENCODER.encode(logprobs)
    return f"{head},{shown}]" if finish_reason is None else f'{head},{shown},"{finish_reason}"]'


def encode_prompt(token_ids: Sequence[int], logprobs: Sequence[Logprobs | None]) -> list[str]:
    """The entries of a prompt's log probabilities, in pieces of PROMPT_PIECE tokens."""
    return [
        _ENCODER.encode(
            {
                "prompt": first,
                "token_ids": list(token_ids[first : first + PROMPT_PIECE]),
                "logprobs": logprobs[first : first + PROMPT_PIECE],
            }
        )
        for first in range(0, len(token_ids), PROMPT_PIECE)
    ]


def decode(position: int, entry: Any) -> Event | None:
    """An entry (parsed JSON) as an event; None for a kind that this version does not know."""
    if isinstance(entry, list):
        logprobs = entry[4] if len(entry) > 4 else None
        return Token(
            position, entry[0], entry[1], entry[2], entry[3], _logprobs(logprobs), entry[5] if len(entry) > 5 else None
        )
    if "end" in entry:
        reasons = tuple(entry["reasons"])
        return End(position, entry["end"], reasons, entry["usage"], read_error(entry["error"]), entry.get("result"))
    if "chunk" in entry:
        return Chunk(position, entry["chunk"], entry["offset"], entry["texts"], entry["task"])
    if "prompt" in entry:
        return Prompt(
            position, entry["prompt"], tuple(entry["token_ids"]), tuple(_logprobs(item) for item in entry["logprobs"])
        )
    return None


def encode_rows(rows: Sequence[Sequence[float] | tuple[Entity, ...] | TextError]) -> str:
    """The `result` of a terminal entry, as JSON. `rows`: of each text as many numbers, which are rounded to fp32, or
    its labelled parts (of all texts then), or its error."""
    results = [row for row in rows if not isinstance(row, TextError)]
    errors = {str(at): asdict(row) for at, row in enumerate(rows) if isinstance(row, TextError)}
    shown = f',"errors":{_ENCODER.encode(errors)}' if errors else ""
    vectors = [row for row in results if not isinstance(row, tuple)]
    if len(vectors) < len(results):
        labels: dict[str, int] = {}
        numbers = array("f")
        for entity in chain.from_iterable(row for row in results if isinstance(row, tuple)):
            numbers.extend((labels.setdefault(entity.label, len(labels)), entity.score, entity.start, entity.end))
        width, counts = _OF_ENTITY, [0 if isinstance(row, TextError) else len(row) for row in rows]
        shown = f',"labels":{_ENCODER.encode([*labels])},"counts":{_ENCODER.encode(counts)}{shown}'
    else:
        numbers, width = array("f", chain.from_iterable(vectors)), len(vectors[0]) if vectors else 0
    data = base64.b64encode(_little_endian(numbers).tobytes()).decode()
    return f'{{"rows":{len(rows)},"width":{width},"data":"{data}"{shown}}}'


#: The numbers of a labelled part.
_OF_ENTITY: Final = 4
#: What was made of a text: numbers, its labelled parts, or its error.
Row: TypeAlias = "array[float] | tuple[Entity, ...] | TextError"


def rows_of(result: Mapping[str, Any]) -> list[Row]:
    """The rows of a terminal entry's `result`, one for each text. Raises ValueError for a broken one."""
    numbers = array("f")
    numbers.frombytes(base64.b64decode(result["data"], validate=True))
    _little_endian(numbers)
    width, count = int(result["width"]), int(result["rows"])
    errors = {int(at): TextError(error["code"], error["message"]) for at, error in result.get("errors", {}).items()}
    counts, labels = result.get("counts"), result.get("labels", ())
    sizes = [0 if at in errors else width if counts is None else width * counts[at] for at in range(count)]
    if len(numbers) != sum(sizes):
        raise ValueError(f"{len(numbers)} numbers are not those of {count - len(errors)} rows")
    rows: list[Row] = []
    start = 0
    for at, size in enumerate(sizes):
        row = numbers[start : start + size]
        start += size
        rows.append(errors.get(at) or (row if counts is None else _entities(row, labels)))
    return rows


def _entities(numbers: array[float], labels: Sequence[str]) -> tuple[Entity, ...]:
    parts = (numbers[start : start + _OF_ENTITY] for start in range(0, len(numbers), _OF_ENTITY))
    return tuple(Entity(labels[int(label)], score, int(start), int(end)) for label, score, start, end in parts)


def row_view(row: Row) -> list[float] | list[dict[str, Any]] | dict[str, Any]:
    """A row as callers see it: its numbers, a list of its labelled parts, or an object with its error."""
    if isinstance(row, TextError):
        return error_view(row)
    return [asdict(entity) for entity in row] if isinstance(row, tuple) else row.tolist()


def error_view(error: TextError) -> dict[str, Any]:
    return {"error": asdict(error)}


def _little_endian(numbers: array[float]) -> array[float]:
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers


def _logprobs(item: Any) -> Logprobs | None:
    return (item[0], tuple((t, p) for t, p in item[1])) if item else None


def plain_tokens(message: bytes, position: int) -> list[Token] | None:
    """The tokens of a channel message. None if it does not begin at this position, if an entry is no token, or has log
    probabilities or a finish reason, and if it cannot be read."""
    try:
        first, *entries = _SCAN(message.decode())[0]
        if first != position or not entries:
            return None
        tokens: list[Token] = []
        for entry in entries:
            if type(entry) is not list or len(entry) != 4:
                return None
            tokens.append(Token(position, *entry))
            position += 1
    except (ValueError, TypeError, RecursionError):
        return None
    return tokens


def decode_message(payload: str | bytes) -> list[tuple[int, Any]]:
    """A channel message as (position, entry) pairs."""
    first, *entries = json.loads(payload)
    return [(first + k, entry) for k, entry in enumerate(entries)]


def stream_position(entry_id: str | bytes) -> int:
    """The position of a stream entry, by its id."""
    name = entry_id.decode() if isinstance(entry_id, bytes) else entry_id
    return int(name.partition("-")[0]) - 1


def pack(entries: Sequence[bytes]) -> bytes:
    """A block of these entries (JSON; none holds a line break)."""
    return zlib.compress(b"\n".join(entries), LEVEL)


def unpack(
    number: int, block: bytes, start: int = 0, max_bytes: int | None = None, each: int = 0
) -> list[tuple[int, Any]]:
    """The entries of block `number`, parsed, each with its position, from position `start` on.

    `max_bytes`: no further entry is parsed once they have so many bytes; each entry counts `each` bytes more. Raises
    zlib.error or ValueError.
    """
    lines = zlib.decompress(block).split(b"\n")[max(0, start - number * BLOCK) :]
    if max_bytes is not None:
        size = kept = 0
        while kept < len(lines) and size < max_bytes:
            size += len(lines[kept]) + each
            kept += 1
        del lines[kept:]
    first = max(start, number * BLOCK)
    # One call for all costs a third of one for each.
    return list(zip(range(first, first + len(lines)), json.loads(b"[%b]" % b",".join(lines)), strict=True))


@dataclass(frozen=True, slots=True)
class Choice:
    """One of a task's `n` outputs. `logprobs`: one element a token, or None if none were requested."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: str | None
    logprobs: tuple[Logprobs | None, ...] | None


@dataclass(frozen=True, slots=True)
class Result:
    """The final state of a task. `times`: name -> server time in ms, as far as the task got."""

    id: str
    model: str
    tier: str
    status: str
    choices: tuple[Choice, ...]
    usage: dict[str, int]
    error: dict[str, Any] | None
    times: dict[str, int]
    prompt_token_ids: tuple[int, ...] | None = None
    """The prompt's token ids, if its log probabilities were requested."""
    prompt_logprobs: tuple[Logprobs | None, ...] | None = None
    """Log probabilities of the prompt's tokens; None for the first token."""
    rows: tuple[Row, ...] | None = None
    """Of a task that generates nothing: for each text a vector, the probabilities of the labels, a score, or a tuple of
    its labelled parts; or its error, if the task's `on_error` is `item`."""

    @property
    def text(self) -> str:
        """The first choice's text."""
        return self.choices[0].text

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The first choice's tokens."""
        return self.choices[0].token_ids

    def raise_for_status(self) -> None:
        """Raise TaskFailed if the task ended `failed` or `cancelled`."""
        if self.status in ("failed", "cancelled"):
            error = self.error or {}
            message = error.get("message") or f"Task {self.id} was {self.status}."
            raise TaskFailed(message, status=self.status, code=error.get("code", self.status), param=error.get("param"))


@dataclass(frozen=True, slots=True)
class TaskInfo:
    """A task as lists show it: its state without its outputs. `times`: as of a Result."""

    id: str
    kind: str
    """`task`, `request` (of OpenAI's endpoints, whose caller waits) or `response` (in the background)."""
    model: str
    tier: str
    status: str
    n: int
    tenant: str | None
    metadata: dict[str, str]
    webhook: dict[str, Any] | None
    """URL and events of its own webhook."""
    retried_from: str | None
    usage: dict[str, int] | None
    error: dict[str, Any] | None
    times: dict[str, int]

    @classmethod
    def of(cls, record: Record) -> TaskInfo:
        return cls(
            id=record.id,
            kind=record.kind,
            model=record.model,
            tier=record.tier,
            status=record.status,
            n=record.n,
            tenant=record.fields.get("tenant"),
            metadata=record.metadata,
            webhook=record.json("webhook"),
            retried_from=record.fields.get("retried_from"),
            usage=record.json("usage"),
            error=record.json("error"),
            times=_times(record),
        )


@dataclass(frozen=True, slots=True)
class TaskPage:
    """A part of a list of tasks. `next`: the `after` of the next part, which may have more where this one is empty;
    None at the end."""

    tasks: tuple[TaskInfo, ...]
    next: str | None

    def __iter__(self) -> Iterator[TaskInfo]:
        return iter(self.tasks)

    def __len__(self) -> int:
        return len(self.tasks)


def _times(record: Record) -> dict[str, int]:
    return {name: at for name in TIMES if (at := record.time(name)) is not None}


def collect(record: Record, events: Iterable[Event]) -> Result:
    """The result of a final record and all events of its stream."""
    tokens: list[list[Token]] = [[] for _ in range(record.n)]
    prompts: list[Prompt] = []
    rows: tuple[Row, ...] | None = None
    for event in events:
        if isinstance(event, Token):
            tokens[event.choice].append(event)
        elif isinstance(event, Prompt):
            prompts.append(event)
        elif isinstance(event, End) and event.result is not None:
            rows = tuple(rows_of(event.result))
    reasons = record.json("reasons") or []
    return Result(
        id=record.id,
        model=record.model,
        tier=record.tier,
        status=record.status,
        choices=tuple(
            Choice(
                index=index,
                text="".join(token.text for token in of_choice),
                token_ids=tuple(token.token_id for token in of_choice),
                finish_reason=reasons[index] if index < len(reasons) else None,
                logprobs=tuple(t.logprobs for t in of_choice) if any(t.logprobs for t in of_choice) else None,
            )
            for index, of_choice in enumerate(tokens)
        ),
        usage=record.json("usage") or {},
        error=record.json("error"),
        times=_times(record),
        prompt_token_ids=tuple(chain.from_iterable(part.token_ids for part in prompts)) if prompts else None,
        prompt_logprobs=tuple(chain.from_iterable(part.logprobs for part in prompts)) if prompts else None,
        rows=rows,
    )


def summary(result: Result) -> dict[str, Any]:
    """The value of a plain Celery task's AsyncResult."""
    return {
        "id": result.id,
        "model": result.model,
        "status": result.status,
        "text": result.text,
        "token_ids": result.token_ids,
        "choices": [
            {"text": c.text, "token_ids": c.token_ids, "finish_reason": c.finish_reason} for c in result.choices
        ],
        "usage": result.usage,
        **({} if result.rows is None else {"rows": [row_view(row) for row in result.rows]}),
    }


def failure(error: Mapping[str, Any] | None) -> TaskFailed:
    """The exception of a failed plain Celery task's AsyncResult. `error`: as in the record."""
    error = error or {}
    return TaskFailed(
        error.get("message", "The task failed."), "failed", error.get("code", "failed"), error.get("param")
    )


def view(result: Result) -> dict[str, Any]:
    """A result as JSON's object, in the form of GET /v1/tasks/{id}. Times are unix seconds."""
    return {
        "id": result.id,
        "object": "task",
        "status": result.status,
        "model": result.model,
        "tier": result.tier,
        "created_at": _seconds(result, "created"),
        "finished_at": _seconds(result, "finished"),
        "usage": result.usage,
        "error": result.error,
        "choices": [
            {
                "index": choice.index,
                "text": choice.text,
                "token_ids": choice.token_ids,
                "finish_reason": choice.finish_reason,
                "logprobs": None
                if choice.logprobs is None
                else [None if scores is None else logprobs_view(scores) for scores in choice.logprobs],
            }
            for choice in result.choices
        ],
        "prompt_logprobs": None
        if result.prompt_token_ids is None
        else prompt_view(result.prompt_token_ids, result.prompt_logprobs or ()),
        **({} if result.rows is None else {"rows": [row_view(row) for row in result.rows]}),
    }


def _seconds(result: Result, name: str) -> float | None:
    return result.times[name] / 1000 if name in result.times else None


def logprobs_view(logprobs: Logprobs) -> dict[str, Any]:
    """A token's log probability and its alternatives, as callers see them."""
    logprob, top = logprobs
    return {"logprob": logprob, "top": [{"token_id": token, "logprob": value} for token, value in top]}


def prompt_view(token_ids: Sequence[int], logprobs: Sequence[Logprobs | None]) -> list[dict[str, Any]]:
    """A prompt's tokens with their log probabilities, as callers see them; null for the first."""
    return [
        {"token_id": token, **(logprobs_view(scores) if scores else {"logprob": None, "top": []})}
        for token, scores in zip(token_ids, logprobs, strict=True)
    ]
