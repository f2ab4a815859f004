"""What a client writes down of a task, and when."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from tests.waiting import PATIENCE_S
from workers.trials.chaos.caller import Caller
from workers.trials.chaos.checker.case import Journal, ObservedTask, lines_of
from workers.trials.chaos.load import Manner
from workers.trials.chaos.senders import Senders

MANNER = Manner(0, 0, "none", cancel_after=0.0)


@asynccontextmanager
async def _gateway(*answers: bytes) -> AsyncIterator[str]:
    """Gives each request the next of these answers, and the ones after those none at all."""
    left, asked = list(answers), asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while await reader.readuntil(b"\r\n\r\n"):
            if not left:
                await asked.wait()
            head, body = left.pop(0).split(b" ", 1)
            writer.write(b"HTTP/1.1 %s\r\nContent-Length: %d\r\n\r\n%s" % (head, len(body), body))
            await writer.drain()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()


async def _cancelled(folder: Path, url: str, killed_at: int = 0) -> list[Any]:
    """What the journal says after a client cancelled, or was killed at it once so many lines said so."""
    seen, journal = ObservedTask(0, 0, "http", {}, id="t"), Journal(folder, "client")
    async with Senders(url, "redis://127.0.0.1:1/0", "redis://127.0.0.1:1/0") as senders:
        following = asyncio.create_task(Caller(senders, journal).follow(seen, MANNER))
        async with asyncio.timeout(PATIENCE_S):
            while not following.done() and not 0 < killed_at <= len(_said(lines_of(journal.path))):
                await asyncio.wait([following], timeout=0.1)
        following.cancel()
        await asyncio.wait([following])
    return _said(lines_of(journal.path))


def _said(lines: Sequence[dict[str, Any]] | Any) -> list[Any]:
    return [line["accepted"] for line in lines if line["e"] == "cancel"]


async def test_a_cancel_is_written_down_before_anybody_answers_it(tmp_path: Path) -> None:
    async with _gateway() as url:
        assert await _cancelled(tmp_path, url, killed_at=1) == [None]


async def test_a_cancel_is_asked_for_until_it_is_answered_and_no_more(tmp_path: Path) -> None:
    busy, no = b'503 {"error": 1}', b'200 {"accepted": false, "status": "completed"}'
    async with _gateway(busy, no, no, no) as url:
        assert await _cancelled(tmp_path, url) == [None, None, False]


async def test_nobody_is_asked_again_to_cancel_what_is_not_there(tmp_path: Path) -> None:
    async with _gateway(b'404 {"error": 1}') as url:
        assert await _cancelled(tmp_path, url) == [None]
