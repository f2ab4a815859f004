"""`/v1/dead_letters`, for keys of the scope admin: tasks that were given up, and messages that no worker could use.

producers.admin.dead_letters: a page, a letter, its replay, its removal ─▶ views, cut to bounded sizes

A letter is named by its key, which is made of its content. Messages and reasons may have been written by anybody.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Final, Literal, Self

from fastapi import APIRouter, Query, Request
from pydantic import BaseModel, Field

from producers.admin import dead_letters
from producers.admin.dead_letters import BrokenRecord, Letter, NotReplayed
from producers.contract.profile import sane
from producers.contract.record import Record
from producers.errors import shown
from producers.gateway.context import gateway_of
from producers.gateway.fleet import as_unicode, count, text
from producers.gateway.http.authorization import ADMINISTERS, actor_of
from producers.gateway.http.errors import ONCE, Problem
from producers.gateway.tasks.views import errors
from producers.store.access import audit

#: Letters on a page, unless asked for otherwise, and the most.
PAGE, MAX_PAGE = 100, 1000
#: Most bytes of the letters that are read for a page.
MAX_BYTES: Final = 8 << 20
#: Most characters of a message that are shown.
MAX_MESSAGE: Final = 16_384
#: Most lost workers that are shown.
MAX_LOST: Final = 20
#: A letter's key: the beginning of a SHA-256.
KEY: Final = re.compile("[0-9a-f]{12}")
Near = Annotated[
    int | None, Query(ge=0, le=2**31, description="its `index` in the list, so that it is found without a search")
]
router = APIRouter(prefix="/v1/dead_letters", tags=["fleet"], dependencies=ADMINISTERS)


class LetterView(BaseModel):
    """A dead letter."""

    key: str
    object: Literal["dead_letter"] = "dead_letter"
    at: float = Field(description="unix seconds, by the broker's clock; 0 where it does not say")
    task_id: str | None = Field(description="null where its message names none")
    list: str = Field(description="the list of the broker that it was taken from")
    reason: str

    @classmethod
    def of(cls, letter: Letter, **more: Any) -> Self:
        return cls(
            key=letter.key,
            at=(sane(letter.at_ms) or 0.0) / 1000,
            task_id=None if letter.task_id is None else text(letter.task_id),
            list=text(letter.list_name),
            reason=text(letter.reason),
            **more,
        )


class IndexedLetter(LetterView):
    index: int = Field(description="its place in the list now; it falls as letters before it are removed")


class LetterPage(BaseModel):
    """A page of the dead letters, oldest first."""

    object: Literal["list"] = "list"
    data: list[IndexedLetter]
    total: int = Field(description="all dead letters")
    next: int | None = Field(description="`start` of the next page; null at the end")


class LossView(BaseModel):
    """A worker that died with the task."""

    worker: str
    at: float | None
    entries: int | None = Field(description="entries of the task's stream then")


class LetterRecord(BaseModel):
    """The recorded state of the letter's task."""

    status: str
    model: str | None
    tenant: str | None
    starts: int = Field(description="how often workers took it up")
    deaths: int = Field(description="how many of them died")
    lost: list[LossView]

    @classmethod
    def of(cls, record: Record) -> Self:
        fields, losses = record.fields, record.json("lost")
        rows = [loss for loss in losses if isinstance(loss, dict)] if isinstance(losses, list) else []
        return cls(
            status=text(record.status),
            model=text(fields.get("model")) or None,
            tenant=text(fields.get("tenant")) or None,
            starts=_number(fields.get("claims")),
            deaths=_number(fields.get("deaths")),
            lost=[
                LossView(
                    worker=text(loss.get("owner")),
                    at=None if (at := sane(loss.get("at"))) is None else at / 1000,
                    entries=count(loss.get("entries")),
                )
                for loss in rows[:MAX_LOST]
            ],
        )


class LetterDetails(LetterView):
    """A dead letter with its message, and the record of its task."""

    message: str = Field(description=f"as the broker had it: its first {MAX_MESSAGE} characters")
    message_characters: int
    record: LetterRecord | None = Field(description="null where there is none any more, or it cannot be read")
    record_error: str | None = Field(description="why the record cannot be read")


class LetterReplayed(BaseModel):
    key: str
    object: Literal["dead_letter.replayed"] = "dead_letter.replayed"
    was: str | None = Field(description="the task that was given up: it stays failed")
    task_id: str | None = Field(description="the task that runs now, where that is known")
    new_task: bool = Field(description="false: its message is in its list again, as it was")


class LetterDeleted(BaseModel):
    key: str
    object: Literal["dead_letter.deleted"] = "dead_letter.deleted"
    deleted: Literal[True] = True


@router.get("", response_model=LetterPage)
async def listed(
    request: Request,
    start: Annotated[int, Query(ge=0, le=2**31, description="index of the first")] = 0,
    limit: Annotated[int, Query(ge=1, le=MAX_PAGE, description="most letters to answer with")] = PAGE,
) -> LetterPage:
    """List the dead letters, oldest first. Those that are removed meanwhile move the others up."""
    client = gateway_of(request).client
    total = (await client.broker.depths([])).dead_letters
    letters = await dead_letters.page(client, start, limit, MAX_BYTES)
    end = start + len(letters)
    data = [IndexedLetter.of(letter, index=start + i) for i, letter in enumerate(letters)]
    return LetterPage(data=data, total=total, next=end if letters and end < total else None)


@router.get("/{key}", response_model=LetterDetails, responses=errors(404))
async def look(request: Request, key: str, index: Near = None) -> LetterDetails:
    """Get a dead letter, its message, and which workers its task lost."""
    letter = await _letter(request, key, index)
    record, error = None, None
    try:
        record = await dead_letters.record_of(gateway_of(request).client, letter)
    except BrokenRecord as broken:
        error = as_unicode(str(broken))
    return LetterDetails.of(
        letter,
        message=as_unicode(letter.message[:MAX_MESSAGE]),
        message_characters=len(letter.message),
        record=None if record is None else LetterRecord.of(record),
        record_error=error,
    )


@router.post("/{key}/replay", response_model=LetterReplayed, responses=errors(400, 404, 409))
async def replay(request: Request, key: str, index: Near = None) -> LetterReplayed:
    """Submit a given-up task again under a new id, or put a message that no worker could use back into its list."""
    letter = await _letter(request, key, index)
    try:
        done = await dead_letters.replay(gateway_of(request).client, letter)
    except (NotReplayed, BrokenRecord) as error:
        message = f"It was not replayed: {error}."
        raise Problem(409, message, code="not_replayed", headers=ONCE) from None
    await audit.append(gateway_of(request).client.store, actor_of(request).did("dead_letter.replay", key))
    was = None if letter.task_id is None else text(letter.task_id)
    task_id = None if done.task_id is None else text(done.task_id)
    return LetterReplayed(key=key, was=was, task_id=task_id, new_task=done.new_task)


@router.delete("/{key}", response_model=LetterDeleted, responses=errors(404))
async def drop(request: Request, key: str, index: Near = None) -> LetterDeleted:
    """Remove a dead letter. Its task's record stays until it expires."""
    letter = await _letter(request, key, index)
    if not await dead_letters.purge(gateway_of(request).client, letter):
        raise _missing(key)
    await audit.append(gateway_of(request).client.store, actor_of(request).did("dead_letter.delete", key))
    return LetterDeleted(key=key)


async def _letter(request: Request, key: str, index: int | None) -> Letter:
    """Raises Problem where there is none."""
    client = gateway_of(request).client
    letter = await dead_letters.find(client, key, index) if KEY.fullmatch(key) else None
    if letter is None:
        raise _missing(key)
    return letter


def _missing(key: str) -> Problem:
    message = f"There is no dead letter {shown(key)}: GET /v1/dead_letters lists them."
    return Problem(404, message, code="dead_letter_not_found")


def _number(value: str | None) -> int:
    return int(value) if value is not None and value.isdecimal() and len(value) < 10 else 0
