"""Lines of a batch's files, in OpenAI's form: what became of each request."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Self

from producers.contract.record import Record
from producers.store.batches import Batch, Part, task_id
from producers.store.blobs import Blobs, BlobWriter
from producers.sweeper.batches.endpoint import Answer
from producers.sweeper.batches.reading import Requests

OUTPUT: Final = "output"
ERROR: Final = "error"
#: Code of a line that did not end in time -> its message.
REASONS: Final = {
    "batch_expired": "This request could not be executed before the completion window expired.",
    "batch_cancelled": "This request was not executed, or not to its end, because the batch was cancelled.",
    "line_lost": "What this request's task made is gone from the store: it was removed, or its time to live has ended.",
}
LAPSED: Final = "batch_expired"


@dataclass(frozen=True, slots=True)
class Outcome:
    """A line's outcome: an answer, or the code of REASONS."""

    answer: Answer | None = None
    code: str = ""

    @property
    def kind(self) -> str:
        """The file that the line goes to."""
        return OUTPUT if self.answer is not None and self.answer.status == 200 else ERROR

    def to_line(self, batch: Batch, line: int, custom_id: str) -> bytes:
        """The line of the file, with its end."""
        name = task_id(batch.id, line)
        head = f'{{"id": "batch_req_{name.replace("-", "")}", "custom_id": {json.dumps(custom_id)}, '
        if self.answer is None:
            error = json.dumps({"code": self.code, "message": REASONS[self.code]})
            return f'{head}"response": null, "error": {error}}}\n'.encode()
        answer = f'"response": {{"status_code": {self.answer.status}, "request_id": "{name}", "body": '
        return b"".join((head.encode(), answer.encode(), self.answer.body, b'}, "error": null}\n'))


def unfinished(batch: Batch, record: Record) -> str:
    """The code of a final record that was late, or cancelled, with its batch; empty if it ended by itself."""
    error = record.json("error") or {}
    if record.status in ("incomplete", "failed") and error.get("code") == "expired":
        return LAPSED if (record.time("finished") or 0) >= batch.deadline else ""
    return "batch_cancelled" if record.status == "cancelled" and batch.status == "cancelling" else ""


class Files:
    """The blobs of one part, written as its lines come. `names`: kind -> blob. Leaving the context without `commit`
    discards them."""

    def __init__(self, blobs: Blobs, names: Mapping[str, str]) -> None:
        self.counts = dict.fromkeys(names, 0)
        self.lapsed = 0
        self._blobs = blobs
        self._names = names
        self._writers: dict[str, BlobWriter] = {}

    def take(self, batch: Batch, found: Requests, outcomes: Mapping[int, Outcome]) -> None:
        """Write these lines. Blocks. Raises OSError."""
        pieces: dict[str, list[bytes]] = {kind: [] for kind in self._names}
        for line, outcome in outcomes.items():
            pieces[outcome.kind].append(outcome.to_line(batch, line, found.requests[line - found.first].custom_id))
            self.lapsed += outcome.code == LAPSED
        for kind, some in pieces.items():
            if some:
                self.counts[kind] += len(some)
                if kind not in self._writers:
                    self._writers[kind] = self._blobs.writer(self._names[kind])
                self._writers[kind].write(b"".join(some))

    def commit(self) -> list[Part]:
        """Make the blobs durable, those that have lines. Blocks. Raises OSError."""
        for writer in self._writers.values():
            writer.commit()
        return [Part(kind, self._names[kind], writer.size) for kind, writer in self._writers.items()]

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *how: Any) -> None:
        for writer in self._writers.values():
            await asyncio.to_thread(writer.__exit__, *how)
