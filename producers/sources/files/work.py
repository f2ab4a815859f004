"""Takes a location's open objects forward, whichever process opened them.

    open_entries ─▶ Intake: blob, batch ─▶ (the sweeper runs it) ─▶ Delivery: outbox ─▶ INBOX_DONE

    Intake      object ─▶ note, blob, FILE_MADE ─▶ url of its first line ─▶ BATCH_CREATE
    Delivery    errors ─▶ <name>.errors.jsonl, output ─▶ <name>.jsonl ─▶ input moved or left ─▶ input's copy removed

One process works on an object at a time, by a lease in the store, so that no gigabytes are copied twice. Two at once
are harmless: all that is made has an id or a name that the entry gives, so whoever goes on after a kill makes the same.
The sweeper checks the input's lines, as it checks all inputs: an object with bad lines is a batch that fails.

Both files of the outbox are always written, and either may be empty, so nothing remains of an earlier content of the
same name. The output comes last: whoever sees it sees all. Each file appears whole or not at all.
"""

from __future__ import annotations

import asyncio
import json
import logging
import threading
import time
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import chain, islice
from typing import Annotated, Any, Final, Literal, Self, cast

from pydantic import Field, model_validator
from redis.asyncio import Redis

from producers.client.aio import AsyncClient
from producers.client.steps import FAILURES
from producers.connection.log_throttle import warn_throttled
from producers.connection.script import arun
from producers.connection.trouble import error_text, sleep_unless_cancelled, trouble
from producers.contract.fields import MAX_TENANT
from producers.errors import InvalidTask, shown
from producers.sources.files import vectors
from producers.sources.source import Context, Source, SourceSettings, ended, fitting, together
from producers.store import batches, files, inbox
from producers.store.batches import ENDPOINTS, METADATA_FORM, TEXT, WINDOW_FORM, Batch, is_metadata, window_s
from producers.store.blobs import BlobNotFound, Blobs, Line, lines
from producers.store.inbox import Entry, InboxObject
from producers.sweeper.batches.input import is_blank

#: Bytes that are read at a time: what a copy holds in memory, twice.
PIECE: Final = 4 << 20
SUFFIX: Final = ".jsonl"
ERRORS: Final = ".errors.jsonl"


class Replaced(Exception):
    """The object is gone, or has another content by now."""


class Stopped(Exception):
    """The process ends, and gives the copy up."""


class Location(ABC):
    """A bucket or a folder. All methods block, and may raise OSError.

    `name`: the same in all processes that serve it. `moves`: whether an object leaves the inbox when its batch has
    ended. `changes`: whether `read` may give bytes of another content.
    """

    changes = False
    name: str
    moves: bool

    @abstractmethod
    def open(self) -> None:
        """Make, or check, what is needed."""

    @abstractmethod
    def url(self, name: str) -> str:
        """Returns the URL or path of an object of the inbox, for people."""

    @abstractmethod
    def find(self, name: str) -> InboxObject | None:
        """Returns the object of this name, as it is now; None if there is none."""

    @abstractmethod
    def refusal(self, name: str) -> str | None:
        """Returns why an object of this name cannot be taken: its results could not be written. None if it can."""

    @abstractmethod
    def read(self, item: InboxObject, start: int, size: int) -> bytes:
        """Returns up to `size` bytes of an object; none behind its end. Raises Replaced."""

    @abstractmethod
    def write(self, name: str, pieces: Iterable[bytes]) -> None:
        """Write an object of the outbox, whole or not at all, over one of that name. Blocks while pieces come."""

    def write_blob(self, name: str, blobs: Blobs, blob: str, stopped: Callable[[], bool]) -> None:
        """Write a blob as an object of the outbox. Raises BlobNotFound, Stopped."""
        self.write(name, pieces(blobs, blob, stopped))

    @abstractmethod
    def leave(self, item: InboxObject) -> None:
        """Move the object out of the inbox, if it is there with this content."""

    def copy(self, item: InboxObject, blobs: Blobs, blob: str, stopped: Callable[[], bool]) -> int:
        """Make a blob of an object. Returns its size (bytes). Raises Replaced, Stopped."""
        with blobs.writer(blob) as writer:
            while writer.size < item.size:
                if stopped():
                    raise Stopped
                data = self.read(item, writer.size, min(PIECE, item.size - writer.size))
                if not data:
                    raise Replaced
                writer.write(data)
            if self.changes and self.find(item.name) != item:
                raise Replaced
            writer.commit()
        return item.size

    def lines(self, item: InboxObject) -> Iterator[Line]:
        """The lines of an object. Raises Replaced, at their end if it was replaced meanwhile."""
        yield from lines(cast(Blobs, _Content(self, item)), item.name)
        if self.changes and self.find(item.name) != item:
            raise Replaced


def is_input(name: str) -> bool:
    """Whether an object of this name is taken. The name of an errors file would be that of another input's errors."""
    return name.endswith(SUFFIX) and not name.endswith(ERRORS) and name.rpartition("/")[2] != SUFFIX


def pieces(blobs: Blobs, blob: str, stopped: Callable[[], bool]) -> Iterator[bytes]:
    """A blob's bytes. Raises BlobNotFound, Stopped."""
    at = 0
    while piece := blobs.read(blob, at, PIECE):
        if stopped():
            raise Stopped
        at += len(piece)
        yield piece


log = logging.getLogger(__name__)

#: Most bytes of an input, unless the settings say otherwise: as many as a gateway takes.
MAX_FILE = 2 << 30
#: Time (s) between two looks at what is open.
EVERY_S: Final = 1.0
#: Objects of a source that are copied at a time.
STEPS: Final = 2
#: Time (s) after which a process that works on an object counts as dead.
LEASE_S: Final = 15.0
RENEWALS: Final = 3
#: Longest pause (s) before an object that failed is tried again. It doubles from EVERY_S on.
LONGEST_PAUSE_S: Final = 60.0
#: Lines, blank ones not counted, among which the first one with a known `url` is looked for.
LOOKED_AT: Final = 100


def _is_metadata(value: dict[str, Any]) -> bool:
    return "source" not in value and is_metadata({**value, "source": ""})


class InboxSettings(SourceSettings, ABC):
    """The settings of each batch of a source."""

    endpoint: Annotated[str, fitting(ENDPOINTS.__contains__, f"one of {', '.join(ENDPOINTS)}")] | None = Field(
        None, description=f"one of {', '.join(ENDPOINTS)}; unset: the `url` of the input's first line"
    )
    completion_window: Annotated[str, fitting(window_s, WINDOW_FORM)] = Field("24h", description=WINDOW_FORM)
    tenant: str | None = Field(
        None, min_length=1, max_length=MAX_TENANT, description=f"a name of 1 to {MAX_TENANT} characters"
    )
    metadata: Annotated[
        dict[str, Any], fitting(_is_metadata, f"{METADATA_FORM}; one of them is `source`, the input's own URL")
    ] = Field(default_factory=dict, description=METADATA_FORM)
    after: Literal["move", "leave"] = Field(
        "move", description='"move" (inputs go to done/ when their batch has ended) or "leave"'
    )
    embed: Annotated[dict[str, Any], fitting(vectors.is_embedding, vectors.FORM)] | None = Field(
        None, description=f"{vectors.FORM}; the lines of inputs are texts then, and results are their vectors"
    )
    max_file: int = Field(MAX_FILE, ge=1, description="the most bytes of an input, 1 or more")

    @model_validator(mode="after")
    def _one_endpoint(self) -> Self:
        if self.embed is not None and self.endpoint not in (None, vectors.URL):
            raise ValueError(
                f"has endpoint {self.endpoint} and embed, which is for {vectors.URL}; leave one of them out"
            )
        if self.embed is not None:
            vectors.check_installed(self.embed.get("format", "jsonl"))
        return self


class InboxSource(Source):
    """A source whose objects become batches."""

    def __init__(self, name: str, location: Location, work: Work) -> None:
        self.name = name
        self._location = location
        self._work = work

    def unready(self) -> list[str]:
        return [self._work.trouble] if self._work.trouble else []

    async def run(self) -> None:
        await asyncio.to_thread(self._location.open)
        await together(self._work.run(), *self._duties())

    @abstractmethod
    def _duties(self) -> list[Coroutine[Any, Any, None]]:
        """Coroutines that run beside the work on open objects."""


class Work:
    """One process's work on the open objects of a location."""

    def __init__(self, name: str, context: Context, location: Location, blobs: Blobs, settings: InboxSettings) -> None:
        self._name = name
        self._outcomes = context.outcomes
        self._outcomes.begin(name)
        self._process = context.process
        self._store = context.client.store
        self._location = location
        self._blobs = blobs
        self._intake = Intake(context.client, blobs, location, settings)
        self._delivery = Delivery(self._store, blobs, location)
        self._steps = asyncio.Semaphore(STEPS)
        self._entry_opened = asyncio.Event()
        self._retries: dict[str, tuple[float, float]] = {}
        """Batch id -> time of the next try, and the pause before it (s)."""
        self._stalled: dict[str, str] = {}
        """Batch id -> the server trouble that stalls it."""

    @property
    def trouble(self) -> str:
        """The last reason that stalls an open object; empty when all go on, here or in another process."""
        return next(reversed(self._stalled.values()), "")

    async def open(self, item: InboxObject) -> None:
        """Open an entry for an object, unless it has one. Raises redis.exceptions.RedisError and OSError."""
        if refusal := self._location.refusal(item.name):
            warn_throttled(log, "source %s: %s is left where it is: %s", self._name, shown(item.name), refusal)
            return
        entry = inbox.new_entry(self._location.name, item, int(time.time() * 1000))
        new, _ = await arun(self._store, inbox.take(self._location.name, entry))
        if new:
            self._entry_opened.set()
            log.info("source %s: %s (%d bytes) is batch %s", self._name, shown(item.name), item.size, entry.id)

    async def run(self, every_s: float = EVERY_S) -> None:
        """Take all open objects forward, until cancelled. Raises redis.exceptions.RedisError and OSError."""
        running: dict[str, asyncio.Task[None]] = {}
        stopped = threading.Event()
        try:
            while True:
                self._entry_opened.clear()
                entries = await inbox.open_entries(self._store, self._location.name)
                self._forget_all_but({entry.id for entry, _ in entries})
                for entry, status in entries:
                    waits = status is not None and status not in batches.ENDED
                    if not waits and entry.id not in running and self._is_due(entry):
                        task = running[entry.id] = asyncio.create_task(
                            self._advance(entry, stopped.is_set), name=entry.id
                        )
                        task.add_done_callback(lambda over: running.pop(over.get_name()))
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._entry_opened.wait(), every_s)
        finally:
            stopped.set()  # threads go on when their tasks are cancelled
            await ended(list(running.values()))

    def _forget_all_but(self, open_now: set[str]) -> None:
        """Forget entries that another process has finished."""
        for kept in (self._retries, self._stalled):
            for batch_id in kept.keys() - open_now:
                del kept[batch_id]

    def _is_due(self, entry: Entry) -> bool:
        return time.monotonic() >= self._retries.get(entry.id, (0.0, 0.0))[0]

    async def _advance(self, entry: Entry, stopped: Callable[[], bool]) -> None:
        try:
            async with self._steps:
                await self.take_forward(entry, stopped)
        except FAILURES as error:
            self._later(entry, error_text(error), error)
        except BlobNotFound as error:
            self._later(entry, f"{error} in --files-dir, which all processes share", error)
        except Exception as error:  # noqa: BLE001 - one object must not stop the others
            warn_throttled(log, "an object of source %s failed here:\n%s", self._name, traceback.format_exc())
            self._later(entry, f"{type(error).__name__}: {error}", error)
        else:
            self._retries.pop(entry.id, None)
            self._stalled.pop(entry.id, None)

    def _later(self, entry: Entry, why: str, error: Exception) -> None:
        pause = min(2 * self._retries.get(entry.id, (0.0, EVERY_S / 2))[1], LONGEST_PAUSE_S)
        self._retries[entry.id] = time.monotonic() + pause, pause
        name = shown(entry.object.name)
        if trouble(error) is not None:  # else it is this object's alone
            self._stalled[entry.id] = f"{name} is held up: {why}"
        warn_throttled(log, "source %s: %s is held up, trying again: %s", self._name, name, why)

    async def take_forward(self, entry: Entry, stopped: Callable[[], bool]) -> None:
        """Take the object forward while no other process does, unless one has finished it meanwhile."""
        if await self._hold(entry) != 0:
            return
        holding = asyncio.create_task(self._keep(entry))
        try:
            if await inbox.is_open(self._store, self._location.name, entry):
                await self._step(entry, stopped)
        except Stopped:
            pass
        except Replaced:
            log.warning(
                "source %s: %s was replaced or removed before it was read", self._name, shown(entry.object.name)
            )
            await files.remove(self._store, self._blobs, input_file(entry))
            if await arun(self._store, inbox.done(self._location.name, entry, forget=True)):
                self._outcomes.add(self._name, "missed")
        finally:
            holding.cancel()
            with suppress(*FAILURES):
                await arun(self._store, inbox.let_go(entry, self._process))

    async def _step(self, entry: Entry, stopped: Callable[[], bool]) -> None:
        batch = await batches.read(self._store, entry.id)
        if batch is None:
            await self._intake.take_in(entry, stopped)
        elif batch.ended:
            if await self._delivery.deliver(entry, batch, stopped):
                self._outcomes.add(self._name, "refused" if batch.status == "failed" else "done")
            log.info("source %s: %s is %s, and in the outbox", self._name, shown(entry.object.name), batch.status)

    async def _hold(self, entry: Entry) -> int:
        return int(await arun(self._store, inbox.hold(entry, self._process, int(LEASE_S * 1000))))

    async def _keep(self, entry: Entry) -> None:
        while True:
            await sleep_unless_cancelled(LEASE_S / RENEWALS)
            with suppress(*FAILURES):
                await self._hold(entry)


class Intake:
    """Makes batches of a location's objects."""

    def __init__(self, client: AsyncClient, blobs: Blobs, location: Location, settings: InboxSettings) -> None:
        self._client = client
        self._store = client.store
        self._blobs = blobs
        self._location = location
        self._settings = settings

    async def take_in(self, entry: Entry, stopped: Callable[[], bool]) -> None:
        """Make the batch. Raises Replaced, Stopped, redis.exceptions.RedisError and OSError."""
        item, limit = entry.object, self._settings.max_file
        if item.size > limit:
            message = f"{shown(item.name)} has {item.size} bytes; at most {limit} are taken (max_file)"
            await self._refuse(entry, "file_too_large", message)
            return
        file_id = input_file(entry)
        if await files.get(self._store, file_id) is None:
            try:
                await self._make_file(entry, file_id, stopped)
            except vectors.BadText as error:
                await self._refuse(entry, "invalid_text", str(error), error.line)
                return
            except InvalidTask as error:
                await self._refuse(entry, error.code, str(error))
                return
        endpoint = self._endpoint
        if endpoint is None:
            endpoint = await asyncio.to_thread(endpoint_of, self._blobs, file_id)
        await arun(self._store, self._create(entry, endpoint))

    async def _make_file(self, entry: Entry, file_id: str, stopped: Callable[[], bool]) -> None:
        kept_s = self._window_s + batches.MARGIN_S + batches.KEPT_S
        end = (entry.at // 1000) + kept_s
        name = entry.object.name.rpartition("/")[2]
        file = files.File(file_id, 0, name, files.BATCH, entry.at // 1000, end, self._settings.tenant or "")
        write = partial(self._location.copy, entry.object, self._blobs, file_id, stopped)
        if (embed := self._settings.embed) is not None:
            card = await self._client.card(embed["model"])
            requests = vectors.requests(self._location.lines(entry.object), embed, card)
            write = partial(_written, self._blobs, file_id, unless(stopped, requests))
        await files.make(self._store, file, write)

    async def _refuse(self, entry: Entry, code: str, message: str, line: int | None = None) -> None:
        """Make a failed batch, in one transaction, so that no sweeper sees it before it has failed."""
        reason = {"code": code, "message": message, "line": line, "param": None}
        async with self._store.pipeline(transaction=True) as pipe:
            for call in (
                self._create(entry, self._endpoint or ENDPOINTS[0]),
                batches.fail(entry.id, [reason]),
            ):
                pipe.execute_command(*call.whole)
            await pipe.execute()

    @property
    def _endpoint(self) -> str | None:
        return self._settings.endpoint if self._settings.embed is None else vectors.URL

    @property
    def _window_s(self) -> int:
        seconds = window_s(self._settings.completion_window)
        assert seconds is not None
        return seconds

    def _create(self, entry: Entry, endpoint: str) -> Any:
        fields: dict[str, str | int] = {
            "endpoint": endpoint,
            "input_file": input_file(entry),
            "completion_window": self._settings.completion_window,
            "metadata": json.dumps({**self._settings.metadata, "source": self._location.url(entry.object.name)[:TEXT]}),
        }
        if self._settings.embed is not None:
            fields["vectors"] = self._settings.embed.get("format", "jsonl")
        if self._settings.tenant:
            fields["tenant"] = self._settings.tenant
        return batches.create(entry.id, self._window_s, fields)


def input_file(entry: Entry) -> str:
    """The id of the file that the object becomes."""
    return files.new_id(entry.at, f"{entry.id}:input")


class _Content:
    """An object, as `lines` reads a blob."""

    def __init__(self, location: Location, item: InboxObject) -> None:
        self._location = location
        self._item = item

    def read(self, _name: str, start: int, size: int) -> bytes:
        size = min(size, self._item.size - start)
        data = self._location.read(self._item, start, size) if size > 0 else b""
        if size > 0 and not data:
            raise Replaced
        return data


def unless(stopped: Callable[[], bool], pieces: Iterable[bytes]) -> Iterator[bytes]:
    """The pieces. Raises Stopped."""
    for piece in pieces:
        if stopped():
            raise Stopped
        yield piece


def _written(blobs: Blobs, blob: str, pieces: Iterable[bytes]) -> int:
    """Make a blob of pieces. Returns its size (bytes). Blocks."""
    with blobs.writer(blob) as writer:
        for piece in pieces:
            writer.write(piece)
        writer.commit()
    return writer.size


def endpoint_of(blobs: Blobs, blob: str) -> str:
    """Returns the endpoint that the first lines name; if they name none, which the check reports, the first endpoint.

    Blocks. Raises BlobNotFound and OSError.
    """
    requests = (line for line in lines(blobs, blob) if not is_blank(line))
    for line in islice(requests, LOOKED_AT):
        url = _url(line.data.removeprefix(b"\xef\xbb\xbf")) if line.data else None
        if url in ENDPOINTS:
            return str(url)
    return ENDPOINTS[0]


def _url(data: bytes) -> Any:
    try:
        request = json.loads(data)
    except (ValueError, RecursionError):
        return None
    return request.get("url") if isinstance(request, Mapping) else None


class Delivery:
    """Delivers the results of a location's batches."""

    def __init__(self, store: Redis, blobs: Blobs, location: Location) -> None:
        self._store = store
        self._blobs = blobs
        self._location = location

    async def deliver(self, entry: Entry, batch: Batch, stopped: Callable[[], bool]) -> bool:
        """Deliver one batch that has ended. Returns False if another process has done so meanwhile.

        Raises Stopped, BlobNotFound, redis.exceptions.RedisError, OSError.
        """
        name = entry.object.name.removesuffix(SUFFIX)
        current = await asyncio.to_thread(self._location.find, entry.object.name)
        if not await inbox.is_newest(self._store, self._location.name, entry, current):
            name += f".{entry.id}"
        output, errors = batch.fields.get("output_file"), batch.fields.get("error_file")
        gone = [file for file in (output, errors) if file and await files.get(self._store, file) is None]
        reasons = [*(batch.json("reasons") or ()), *map(_gone, gone)]
        form = batch.fields.get("vectors")
        for suffix, file, failures in ((ERRORS, errors, reasons), (SUFFIX, output, [])):
            blob = None if file in gone else file
            if form is not None and suffix == SUFFIX:
                await asyncio.to_thread(self._write_vectors, name, form, input_file(entry), blob, stopped)
                continue
            await asyncio.to_thread(
                self._write, name + suffix, [_line(batch, failure) for failure in failures], blob, stopped
            )
        if self._location.moves:
            await asyncio.to_thread(self._location.leave, entry.object)
        await files.remove(self._store, self._blobs, input_file(entry))
        return bool(await arun(self._store, inbox.done(self._location.name, entry, forget=self._location.moves)))

    def _write_vectors(
        self, name: str, form: str, requests: str, answers: str | None, stopped: Callable[[], bool]
    ) -> None:
        results = vectors.results(form, self._blobs, requests, answers)
        self._location.write(name + vectors.SUFFIXES[form], unless(stopped, results))

    def _write(self, name: str, first_lines: Sequence[bytes], blob: str | None, stopped: Callable[[], bool]) -> None:
        """Write an object of the outbox: lines about the input as a whole, then one of the batch's files."""
        if blob is not None and not first_lines:
            self._location.write_blob(name, self._blobs, blob, stopped)
        else:
            self._location.write(name, chain(first_lines, pieces(self._blobs, blob, stopped) if blob else ()))


def _line(batch: Batch, reason: Mapping[str, Any]) -> bytes:
    """A failure of the whole input, as a line of the errors file."""
    return json.dumps({"id": batch.id, "custom_id": None, "response": None, "error": reason}).encode() + b"\n"


def _gone(file: str) -> dict[str, Any]:
    message = f"The batch's file {file} was deleted, or has expired, before it was written here."
    return {"code": "file_gone", "message": message, "line": None, "param": None}
