"""Batches: one function for each script, which returns the `Call` to send; and how a batch is read.

    BATCH_CREATE ─▶ validating ─ BATCH_BEGIN ─▶ in_progress ─ BATCH_FINALIZE ─▶ finalizing ─ BATCH_END ─▶ completed
                        │                          │  BATCH_EXPAND, BATCH_WRITTEN  │                    expired
                        └──── BATCH_CANCEL ────────┴──────▶ cancelling ◀───────────┘ ── BATCH_END ─────▶ cancelled
                        └──── BATCH_FAIL (at any time) ─────────────────────────────────────────────────▶ failed

A batch is the hash `penstock:batch:<id>`:

| field | what it holds |
| --- | --- |
| `v` | 1, the format |
| `status` | OpenAI's statuses, as above |
| `endpoint`, `input_file`, `completion_window`, `metadata`, `tenant` | as created; the window as written ("24h") |
| `principal` | the key that made it, and the models and tiers that it might use then (JSON, `Principal`); absent: all |
| `prices` | the gateway's price table when it was made (`Prices.to_json`); absent: it had none |
| `created`, `deadline`, `window` | server times (ms); seconds. The deadline is that of each line's task |
| `output_kept` | seconds for which its files are kept, if they are not those of all batches |
| `total` | lines of the input, once it is validated; blank lines do not count |
| `level` | the level of the gateway's release, if above those of all: sweepers below it leave its lines alone |
| `line`, `offset` | lines that are expanded, and the offset behind them in the input (bytes) |
| `result_bytes` | of lines that are expanded and not written: the bytes that their `result_bytes` are in all |
| `completed`, `failed` | lines that have ended so far, counted by what made their records final |
| `written`, `written_offset` | lines whose results are in a part of the files, and the offset behind them |
| `outputs`, `errors`, `lapsed` | written lines by file; those of the errors that expired |
| `in_progress_at`, `finalizing_at`, `cancelling_at`, and `<status>_at` of its end | server times (ms) |
| `output_file`, `error_file` | ids of its files, once it has ended; absent if the file would be empty |
| `restored` | 1: it was restored from a backup before it had ended |
| `reasons` | why it failed as a whole: JSON, [{code, line, message, param}] |

The head of each `scripts/batch_*.lua` has its precondition, effect and answers. All may be called twice.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Final

from redis.asyncio import Redis

from producers.connection.script import Call, aexecute_many, script, text
from producers.contract import keys, levels
from producers.contract.keys import timed_id
from producers.store.access.api_keys import LOCAL, Principal
from producers.store.files import KEPT_S as FILES_KEPT_S
from producers.store.protocol import PACKAGE

PREFIX: Final = "batch_"
#: Paths that a batch's lines may be for. The first is that of a batch whose lines name none.
ENDPOINTS: Final = (
    *("/v1/chat/completions", "/v1/completions", "/v1/responses"),
    *("/v1/embeddings", "/v1/rerank", "/v1/classify", "/v1/token_classify", "/v1/score"),
)
#: Longest completion window (s), and the shortest.
MAX_WINDOW_S: Final = 7 * 24 * 3600
MIN_WINDOW_S: Final = 60
WINDOW: Final = re.compile("([1-9][0-9]{0,4})([mhd])")
#: The form of a completion window, for errors.
WINDOW_FORM: Final = "minutes, hours or days, such as 30m, 24h or 7d; 7 days at most"
#: Most pairs of a batch's metadata, and the most characters of a name and of a text.
PAIRS, NAME, TEXT = 16, 64, 512
METADATA_FORM: Final = f"at most {PAIRS} texts by name; a name has up to {NAME} characters, a text up to {TEXT}"
_SECONDS: Final = {"m": 60, "h": 3600, "d": 24 * 3600}
ENDED: Final = frozenset({"completed", "failed", "expired", "cancelled"})
#: Time (s) for which a batch that ended is kept.
KEPT_S: Final = 30 * 24 * 3600
#: Time (s) after the deadline for which a line's result waits to be written: a sweeper may be away for so long.
MARGIN_S: Final = 7 * 24 * 3600
#: Most batches of a tenant that are kept: a new one takes the place of the oldest that has ended.
MOST_KEPT: Final = 10_000
#: Most lines of a tenant's batches that are in the store, unless a setting or the tenant's own limit says otherwise;
#: and their bytes in the inputs.
MAX_LINES: Final = 100_000
MAX_BYTES: Final = 256 << 20
#: Most bytes that the vectors, labels and scores of a tenant's lines that are in the store may take.
MAX_RESULT_BYTES: Final = 512 << 20
#: Time (s) after which a batch is gone from the lists, whatever became of it.
LISTED_S: Final = KEPT_S + 2 * MAX_WINDOW_S + MARGIN_S


def window_s(value: Any) -> int | None:
    """The seconds of a completion window such as "24h"; None for what is none."""
    match = WINDOW.fullmatch(value) if isinstance(value, str) else None
    seconds = int(match[1]) * _SECONDS[match[2]] if match else 0
    return seconds if MIN_WINDOW_S <= seconds <= MAX_WINDOW_S else None


def is_metadata(value: Any) -> bool:
    """Whether a batch may have this metadata."""
    return (
        isinstance(value, dict)
        and len(value) <= PAIRS
        and all(
            isinstance(name, str) and len(name) <= NAME and isinstance(text, str) and len(text) <= TEXT
            for name, text in value.items()
        )
    )


@dataclass(frozen=True, slots=True)
class Batch:
    """A batch as read. Times are server milliseconds."""

    id: str
    fields: Mapping[str, str]

    @classmethod
    def parse(cls, batch_id: str, raw: Mapping[Any, Any]) -> Batch:
        return cls(batch_id, {text(k): text(v) for k, v in raw.items()})

    @property
    def status(self) -> str:
        return self.fields["status"]

    @property
    def ended(self) -> bool:
        return self.status in ENDED

    @property
    def endpoint(self) -> str:
        return self.fields["endpoint"]

    @property
    def input_file(self) -> str:
        return self.fields["input_file"]

    @property
    def tenant(self) -> str:
        """Empty without one."""
        return self.fields.get("tenant", "")

    @property
    def principal(self) -> Principal:
        """The key that made it, with the models and tiers that the key might use then: its lines may use the same."""
        kept = self.fields.get("principal")
        return LOCAL if kept is None else Principal.parse(kept)

    @property
    def metadata(self) -> dict[str, str] | None:
        return self.json("metadata")  # type: ignore[no-any-return]

    @property
    def deadline(self) -> int:
        return int(self.fields["deadline"])

    @property
    def total(self) -> int | None:
        """The number of its lines; None until it is validated."""
        total = self.fields.get("total")
        return None if total is None else int(total)

    @property
    def output_kept_s(self) -> int:
        """Seconds for which its files are kept."""
        return int(self.fields.get("output_kept", FILES_KEPT_S))

    def count(self, name: str) -> int:
        """A field that is a number, 0 if it is not there: `line`, `offset`, `completed`, `failed`, `written`,
        `written_offset`, `outputs`, `errors`, `lapsed`, `level`."""
        return int(self.fields.get(name, 0))

    def time(self, name: str) -> int | None:
        """`created`, `deadline`, or `<status>_at`."""
        value = self.fields.get(name)
        return int(value) if value else None

    def json(self, name: str) -> Any:
        """`metadata` or `reasons`; None where absent."""
        value = self.fields.get(name)
        return json.loads(value) if value else None


@dataclass(frozen=True, slots=True)
class Part:
    """A blob that holds the results of successive lines. `kind`: output or error; `size`: its bytes."""

    kind: str
    name: str
    size: int

    def to_json(self) -> str:
        return json.dumps(asdict(self))


def new_id(ms: int, seed: str | None = None) -> str:
    """An id for a batch made at unix time `ms`, see `producers.contract.keys.timed_id`."""
    return timed_id(PREFIX, ms, seed)


def task_id(batch_id: str, line: int) -> str:
    """The id of a line's task: a UUID that is a function of the batch and the line's number (from 0)."""
    name = hashlib.sha256(f"{batch_id}:{line}".encode()).hexdigest()
    return f"{name[:8]}-{name[8:12]}-8{name[13:16]}-8{name[17:20]}-{name[20:32]}"


# ---- reading -------------------------------------------------------------------------------------------------------
# They raise redis.exceptions.RedisError or OSError.


async def read(store: Redis, batch_id: str) -> Batch | None:
    """The batch; None if there is none of this id."""
    raw = await store.hgetall(keys.batch(batch_id))
    return Batch.parse(batch_id, raw) if raw else None


async def open_batches(store: Redis) -> list[str]:
    """Ids of the batches that have not ended, or are yet to be tidied up; the oldest first."""
    return [text(name) for name in await store.zrange(keys.BATCHES, 0, -1)]


async def page(store: Redis, limit: int, *, after: str | None = None, tenant: str | None = None) -> list[Batch]:
    """Up to `limit` batches, the newest first, from behind the batch `after` on, which may be gone.

    `tenant`: only batches of this one; empty: without one. None: all.
    """
    result: list[Batch] = []
    index = keys.batch_index(tenant) if tenant else keys.BATCH_INDEX
    while len(result) < limit:
        first = f"({after}" if after else "+"
        ids: list[Any] = await store.zrange(index, first, "-", desc=True, bylex=True, offset=0, num=limit)
        if not ids:
            break
        rows = await aexecute_many(store, [("HGETALL", keys.batch(text(name))) for name in ids])
        after = text(ids[-1])
        batches = [Batch.parse(text(name), raw) for name, raw in zip(ids, rows, strict=True) if raw]
        result += [batch for batch in batches if tenant is None or batch.tenant == tenant]
    return result[:limit]


async def trim(store: Redis, now_ms: int) -> int:
    """Remove from the list of all batches those that are not kept any more. Returns their number."""
    return int(await store.zremrangebylex(keys.BATCH_INDEX, "-", f"({_oldest(now_ms)}"))


def _oldest(now_ms: int) -> str:
    """The least id that a listed batch may have."""
    return f"{PREFIX}{max(now_ms - LISTED_S * 1000, 0):012x}"


async def parts(store: Redis, batch_id: str) -> list[Part]:
    """The written parts of a batch's files, in order."""
    rows = await store.hgetall(keys.batch_parts(batch_id))
    each = (json.loads(raw) for _, raw in sorted((int(first), raw) for first, raw in rows.items()))
    return [Part(**part) for raw in each for part in raw]


# ---- changing ------------------------------------------------------------------------------------------------------


def create(batch_id: str, window_s: int, fields: Mapping[str, str | int], most_open: int | None = None) -> Call:
    """BATCH_CREATE: make a batch, `validating`. Answers `new`, `exists`, or `full` if `most_open` of its tenant (None:
    any number) have not ended.

    `fields`: `endpoint`, `input_file`, `completion_window`; where given `metadata` (JSON), `tenant`, `principal`,
    `prices`, `traceparent`, `output_kept`, and `idempotency` (`producers.store.idempotency.Entry.name`).
    """
    level = {"level": levels.LEVEL} if levels.LEVEL > levels.SHARED else {}
    pairs = [part for item in {**fields, **level}.items() for part in item]
    tenant = str(fields.get("tenant", ""))
    names = (keys.batch(batch_id), keys.BATCHES, keys.BATCH_INDEX, keys.open_batches(tenant))
    oldest = _oldest(int(batch_id.removeprefix(PREFIX)[:12], 16))
    numbers = (window_s, oldest, LISTED_S, most_open or 0, MOST_KEPT)
    return Call(script(PACKAGE, "batch_create"), names, (batch_id, *numbers, *pairs))


def begin(batch_id: str, total: int) -> Call:
    """BATCH_BEGIN: the input is valid and has `total` lines. Answers the status then, or `gone`."""
    return Call(script(PACKAGE, "batch_begin"), (keys.batch(batch_id),), (total,))


def fail(batch_id: str, reasons: Sequence[Mapping[str, Any]]) -> Call:
    """BATCH_FAIL: the batch fails as a whole. `reasons`: [{code, line, message, param}]. Answers the status then, or
    `gone`."""
    return Call(script(PACKAGE, "batch_fail"), (keys.batch(batch_id),), (batch_id, json.dumps(reasons)))


def cancel(batch_id: str) -> Call:
    """BATCH_CANCEL: the sweeper is to cancel the batch. Answers `[accepted 0|1, status]`."""
    return Call(script(PACKAGE, "batch_cancel"), (keys.batch(batch_id),), ())


@dataclass(frozen=True, slots=True)
class Entry:
    """A line of a block: a task, by its id and its record's fields, or an error (JSON)."""

    offset: int
    """The first byte of the next line."""
    task: str = ""
    fields: Mapping[str, str | int] = field(default_factory=dict)
    charge: str = ""
    """The charge to the block's accounts (JSON, `producers.store.usage.limits`); empty: nothing."""
    error: str = ""


@dataclass(frozen=True, slots=True)
class Block:
    """Successive lines of an input, from number `first` on. `accounts`: those that its tasks are charged to. `spent`:
    the error (JSON) of a line for which they have no budget."""

    first: int
    entries: Sequence[Entry]
    accounts: Sequence[str] = ()
    spent: str = ""


#: Fields of a line's record that may differ between lines.
LINE_FIELDS: Final = (
    *("task", "model", "version", "queue", "tier", "n", "tokens", "prompt_tokens", "deadline", "line"),
    *("response", "calls", "result_bytes", "adapter", "alias", "generation", "drawn", "named", "level", "form"),
)


async def lines_of(store: Redis, tenant: str) -> tuple[int, int, int]:
    """Lines of a tenant's open batches that are in the store (expanded, and not written), their bytes in the inputs,
    and those that their results may take. Raises redis.exceptions.RedisError or OSError."""
    ids = await store.smembers(keys.open_batches(tenant))
    fields = ("line", "written", "offset", "written_offset", "result_bytes")
    answers = await aexecute_many(store, [("HMGET", keys.batch(text(name)), *fields) for name in ids]) if ids else []
    rows = [[int(number or 0) for number in row] for row in answers if None not in row[:4]]
    results = sum(row[4] for row in rows if row[0] > row[1])
    return sum(row[0] - row[1] for row in rows), sum(row[2] - row[3] for row in rows), results


def expand(batch_id: str, block: Block, shared: Mapping[str, str | int], max_lines: int = MAX_LINES) -> Call:
    """BATCH_EXPAND: make the records of a block's lines. Answers `[]` if the batch is elsewhere by now, else the
    records' time (ms), how many lines are done (a limit may keep off the others), and the numbers of those without
    budget.

    `shared`: fields of all records. `max_lines`: those of the tenant's batches that may be in the store.
    """
    pairs = [part for item in shared.items() for part in item]
    args: list[str | int] = [batch_id, block.first, len(block.entries), block.spent, max_lines, MAX_BYTES]
    args += [MAX_RESULT_BYTES, len(pairs), len(LINE_FIELDS)]
    args += [*pairs, *LINE_FIELDS]
    for entry in block.entries:
        args += (entry.offset, entry.task)
        args += [*(entry.fields.get(name, "") for name in LINE_FIELDS), entry.charge] if entry.task else [entry.error]
    names = (keys.batch(batch_id), keys.batch_refused(batch_id), keys.SUBMITTING, keys.DEADLINES)
    return Call(script(PACKAGE, "batch_expand"), (*names, *map(keys.account, block.accounts)), args)


def queued(ids: Sequence[str]) -> Call:
    """BATCH_QUEUED: the broker has the messages of these tasks. Answers how many are queued then."""
    return Call(script(PACKAGE, "batch_queued"), (keys.SUBMITTING,), ids)


def finalize(batch_id: str) -> Call:
    """BATCH_FINALIZE: no line is expanded any more, if all have ended or the deadline has passed. Answers the status
    then, or `gone`."""
    return Call(script(PACKAGE, "batch_finalize"), (keys.batch(batch_id),), ())


def begin_parts(batch_id: str, names: Sequence[str]) -> Call:
    """BATCH_PART: these blobs are about to be written. Answers 1, or 0 if the batch has ended."""
    return Call(script(PACKAGE, "batch_part"), (keys.batch(batch_id), keys.batch_begun(batch_id)), names)


@dataclass(frozen=True, slots=True)
class Written:
    """Lines whose results are in `parts`: how many are in the output and in the errors, and expired of the latter."""

    first: int
    lines: int
    offset: int
    outputs: int
    errors: int
    lapsed: int
    parts: Sequence[Part]


def written(batch_id: str, done: Written) -> Call:
    """BATCH_WRITTEN: these lines are written; their records are removed. Answers 1, or 0 if the batch is elsewhere by
    now."""
    ids = [task_id(batch_id, line) for line in range(done.first, done.first + done.lines)]
    counts = (done.first, done.lines, done.offset, done.outputs, done.errors, done.lapsed, len(done.parts))
    return Call(
        script(PACKAGE, "batch_written"),
        (keys.batch(batch_id), keys.batch_parts(batch_id), keys.batch_refused(batch_id)),
        (batch_id, *counts, *(part.to_json() for part in done.parts), *ids),
    )


def end(batch_id: str, output_file: str | None, error_file: str | None) -> Call:
    """BATCH_END: the batch ends with these files. Answers the status then, or `gone`."""
    return Call(script(PACKAGE, "batch_end"), (keys.batch(batch_id),), (batch_id, output_file or "", error_file or ""))


def drop(batch_id: str, ids: Sequence[str]) -> Call:
    """BATCH_DROP: forget these tasks of a batch that has ended. Answers 1, or 0 if it has not."""
    return Call(script(PACKAGE, "batch_drop"), (keys.batch(batch_id),), (batch_id, *ids))


def close(batch_id: str) -> Call:
    """BATCH_CLOSE: nothing of a batch that has ended is left but itself. Answers 1, or 0 if it has not ended."""
    names = (keys.batch(batch_id), keys.BATCHES, keys.batch_parts(batch_id), keys.batch_begun(batch_id))
    return Call(script(PACKAGE, "batch_close"), (*names, keys.batch_refused(batch_id)), (batch_id, KEPT_S))
