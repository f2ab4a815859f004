"""A leak to be found, planted in a worker: see `WORKER_PLUGINS` of `tests.worker_process`."""

from __future__ import annotations

import threading
import time

_KEPT: list[object] = []


def leak() -> None:
    """From now on, two open files and 3 MiB a second that are never given back."""

    def go_on() -> None:
        while True:
            _KEPT.append(bytearray(b"x" * (3 << 20)))
            _KEPT.extend(open("/dev/null") for _ in range(2))  # noqa: SIM115 - that is the leak
            time.sleep(1.0)

    threading.Thread(target=go_on, name="leak", daemon=True).start()
