"""Notes when the streams of a killed worker resume, by asking the store and not their readers.

injector: stopped(ids) -> (compare their lengths many times a second, while any is stopped) -> journal: `resumed`
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from typing import Final

from redis.exceptions import RedisError

from producers.connection.connect import connect
from workers.chaos.journal import Journal

#: Time between two looks (s).
EVERY_S: Final = 0.05
#: Time (s) after which a stopped stream is no longer watched: it may be compacted soon.
LONG_S: Final = 120.0


class Pulse(threading.Thread):
    """The watching thread. `store`: the store's URL."""

    def __init__(self, store: str, journal: Journal) -> None:
        super().__init__(name="pulse", daemon=True)
        self._store = connect(store, timeout=2, decode=True)
        self._journal = journal
        self._still: dict[str, tuple[int, float]] = {}
        self._changed = threading.Condition()
        self._over = False

    def stopped(self, lengths: Mapping[str, int]) -> None:
        """Watch stopped streams: task id -> number of entries."""
        with self._changed:
            self._still |= {task_id: (length, time.monotonic()) for task_id, length in lengths.items()}
            self._changed.notify()

    def stop(self) -> None:
        with self._changed:
            self._over = True
            self._changed.notify()
        self.join()
        self._store.close()

    def run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._still or self._over)
                if self._over:
                    return
                still = dict(self._still)
            self._look(still)
            with self._changed:
                self._changed.wait_for(lambda: self._over, EVERY_S)

    def _look(self, still: Mapping[str, tuple[int, float]]) -> None:
        try:
            with self._store.pipeline(transaction=False) as pipe:
                for task_id in still:
                    pipe.xlen(f"penstock:stream:{task_id}")
                lengths = pipe.execute()
        except RedisError:
            return
        now = time.monotonic()
        moved = {
            task_id for (task_id, (length, _)), is_now in zip(still.items(), lengths, strict=True) if is_now > length
        }
        for task_id in moved:
            self._journal.write("resumed", id=task_id, length=still[task_id][0])
        gone = moved | {task_id for task_id, (_, since) in still.items() if now > since + LONG_S}
        with self._changed:
            for task_id in gone:
                if self._still.get(task_id) == still[task_id]:  # otherwise it was stopped again meanwhile
                    del self._still[task_id]
