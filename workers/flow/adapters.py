"""Loads the adapters that tasks ask for into the engine, on a thread of its own, and unloads others to make room.

    claimer ─▶ `ready`: yes ─▶ the task begins
                        no  ─▶ asked for here; the task goes back to the front of its list for a moment (RELEASE, BACK)
    this thread: the files from the store ─▶ Engine.load_adapter ─▶ while there is no room: the adapter goes that was
    used least lately, unless a task runs with it or it was used a moment ago

So no step and no other task waits for it. Adapters are loaded in the order in which tasks asked, and each stays for
GRACE_S, so two that have no room beside each other take turns.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

from engine.errors import AdapterRoomError, EngineClosedError, EngineError, ModelError, RequestError, message_of
from producers.connection.log_throttle import warn_throttled
from producers.store.fleet.adapters import AdapterGone, fetch
from workers.connect import LOST, connect
from workers.flow.deliveries import Deliveries
from workers.state.engine import LoadedAdapter
from workers.state.served import Served

logger = logging.getLogger(__name__)

#: Time (s) for which an adapter stays from its last use on, and for which a failure to load one is remembered.
GRACE_S, FAILED_S = 2.0, 5.0
#: The shortest and the longest time (s) after which a task asks again. In between it is half of the time that has
#: passed since the first task asked: each time takes a RELEASE and a CLAIM.
SOON_S, LATER_S = 0.05, 0.5
#: Most adapters that are asked for, and most failures that are remembered.
MAX_WANTED, MAX_FAILED = 256, 256
RETRY_S = 0.2
#: Most versions of each kind that the lease lists.
MAX_LISTED: Final = 32


class AdapterLoader(threading.Thread):
    """Thread-safe. Adapters have their versions as names in the engine."""

    def __init__(self, served: Served, deliveries: Deliveries) -> None:
        super().__init__(name="penstock-adapters", daemon=True)
        self._engine = served.engine
        self._store = served.settings.store
        self._deliveries = deliveries
        self._changed = threading.Condition()
        # Guarded by it: versions asked for, in order, with the time; times of last use; failures (why, code, time).
        self._wanted: dict[str, float] = {}
        self._used: dict[str, float] = {}
        self._failed: dict[str, tuple[str, str, float]] = {}
        self._stopping = False

    def ready(self, version: str, name: str) -> bool:
        """Whether a task with this adapter may begin now. Otherwise the adapter is to be loaded.

        Raises RequestError, which names it as its task does, if it could not be loaded.
        """
        now = time.monotonic()
        with self._changed:
            if version in self._loaded():
                self._used[version] = now
                return True
            why, code, at = self._failed.get(version, ("", "", 0.0))
            if why and now - at < FAILED_S:
                raise RequestError(f"the adapter {name} (version {version}) {why}", param="model", code=code)
            if len(self._wanted) < MAX_WANTED:
                self._wanted.setdefault(version, now)
                self._changed.notify_all()
            return False

    def delay(self, version: str) -> float:
        """The time (s) after which a task that waits for this adapter asks again."""
        with self._changed:
            asked = self._wanted.get(version)
        elapsed = 0.0 if asked is None else time.monotonic() - asked
        return min(max(SOON_S, elapsed / 2), LATER_S)

    def describe(self) -> dict[str, list[str]]:
        """The versions that are loaded, and those that are being loaded, for the lease; {} where there are none."""
        with self._changed:
            loading = [*self._wanted][:MAX_LISTED]
        loaded = [*self._loaded()][:MAX_LISTED]
        return {"loaded": loaded, "loading": loading} if loaded or loading else {}

    def stop(self, timeout: float) -> bool:
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        if self.is_alive():
            self.join(timeout)
        return not self.is_alive()

    def run(self) -> None:
        redis = None
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._wanted or self._stopping)
                if self._stopping:
                    return
                version = next(iter(self._wanted))
            why, code = "", "adapter_broken"
            try:
                redis = connect(self._store) if redis is None else redis
                self._load(redis, version)
            except LOST as exc:
                warn_throttled(logger, "Cannot read adapter %s, trying again: %s", version, exc)
                with self._changed:
                    self._changed.wait_for(lambda: self._stopping, RETRY_S)
                continue
            except AdapterGone:
                why, code = "was removed from the store", "adapter_not_found"
            except EngineClosedError:
                return  # the engine is lost, and the worker gives itself up: no adapter is to blame
            except EngineError as exc:
                why = (
                    f"cannot be served: {exc}; if its base was replaced after it was added, add one that was trained "
                    "for this version of the base"
                )
            except Exception as exc:
                logger.exception("Adapter %s could not be loaded", version)
                why = f"could not be loaded: {exc!r}"
            self._loaded_or_failed(version, why, code)

    def _loaded(self) -> Mapping[str, LoadedAdapter]:
        return self._engine.adapters

    def _load(self, redis: Any, version: str) -> None:
        with TemporaryDirectory(prefix="penstock-adapter-") as folder, _without(folder):
            fetch(redis, version, Path(folder))
            began = time.monotonic()
            adapter: LoadedAdapter | None = None
            while adapter is None:
                try:
                    adapter = self._engine.load_adapter(version, folder)
                except AdapterRoomError as error:
                    if error.nbytes > self._engine.adapter_bytes:
                        raise
                    with self._changed:
                        # Each try reads the whole files: not before there is more room.
                        while not self._unload_one():
                            if self._changed.wait_for(lambda: self._stopping, SOON_S):
                                return
            size, seconds = adapter.nbytes / 1e6, time.monotonic() - began
            logger.info("Adapter %s is loaded: rank %d, %.1f MB, %.2f s", version, adapter.rank, size, seconds)

    def _unload_one(self) -> bool:
        """Unload the adapter that was used least lately. False if all are in use. Called with the lock held."""
        in_use = {
            delivery.record.fields.get("adapter")
            for delivery in list(self._deliveries.running.values())
            if delivery.record is not None
        }
        now = time.monotonic()
        idle = [
            version
            for version in self._loaded()
            if version not in in_use and now - self._used.get(version, 0.0) >= GRACE_S
        ]
        if not idle:
            return False
        version = min(idle, key=lambda version: self._used.get(version, 0.0))
        self._engine.unload_adapter(version)
        self._used.pop(version, None)
        logger.info("Adapter %s is unloaded: others need its room", version)
        return True

    def _loaded_or_failed(self, version: str, why: str, code: str) -> None:
        now = time.monotonic()
        with self._changed:
            self._wanted.pop(version, None)
            self._failed.pop(version, None)
            if not why:
                self._used[version] = now
                return
            self._failed[version] = why, code, now
            while len(self._failed) > MAX_FAILED:
                del self._failed[next(iter(self._failed))]
        logger.warning("Tasks with adapter %s fail: it %s", version, why)


@contextmanager
def _without(folder: str) -> Iterator[None]:
    """Leaves the folder, which is gone by then and none of the caller's, out of errors about its files."""
    try:
        yield
    except ModelError as error:
        raise ModelError(message_of(error).replace(f"{folder}/", "").replace(folder, "the adapter")) from error
