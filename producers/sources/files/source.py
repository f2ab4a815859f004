"""The common part of buckets and folders: they take up objects, and work on those that are open."""

from __future__ import annotations

import asyncio
from abc import abstractmethod
from collections.abc import Coroutine
from typing import Any

from producers.sources.files.place import Place
from producers.sources.files.work import Work
from producers.sources.source import Source


class InboxSource(Source):
    """A source whose objects become batches."""

    def __init__(self, name: str, place: Place, work: Work) -> None:
        self.name = name
        self._place = place
        self._work = work

    def unready(self) -> list[str]:
        return [self._work.trouble] if self._work.trouble else []

    async def run(self) -> None:
        await asyncio.to_thread(self._place.open)
        try:
            async with asyncio.TaskGroup() as group:
                for duty in (self._work.run(), *self._duties()):
                    group.create_task(duty)
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None

    @abstractmethod
    def _duties(self) -> list[Coroutine[Any, Any, None]]:
        """Coroutines that run beside the work on open objects."""
