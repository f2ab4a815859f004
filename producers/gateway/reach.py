"""Looks now and then whether the place of files' content can be used, for `/readyz`."""

from __future__ import annotations

import asyncio
import time
from typing import Final

from producers.connection.trouble import Trouble, trouble
from producers.store.blobs import Blobs

#: Time (s) for which a look counts. Many may ask: balancers, supervisors, people.
EVERY_S: Final = 15.0


class Reach:
    """Looks when it is asked, once at a time."""

    def __init__(self, blobs: Blobs) -> None:
        self._blobs = blobs
        self._error: OSError | None = None
        self._looked = float("-inf")
        self._looking: asyncio.Task[None] | None = None

    async def error(self, patience_s: float) -> OSError | None:
        """What is wrong, as the last look saw it; None if nothing is. Waits for a look for up to `patience_s`."""
        if self._looking is None and time.monotonic() - self._looked > EVERY_S:
            self._looking = asyncio.create_task(self._look())
        if self._looking is not None:
            await asyncio.wait((self._looking,), timeout=patience_s)
        return self._error

    async def _look(self) -> None:
        try:
            await asyncio.to_thread(self._blobs.check)
            self._error = None
        except OSError as error:
            self._error = error
        finally:
            self._looked, self._looking = time.monotonic(), None


def lasts(error: OSError) -> bool:
    """Whether an operator has to act: the bucket is missing, or refuses. One that is away may come back."""
    return trouble(error) is not Trouble.AWAY
