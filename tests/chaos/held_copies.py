"""`penstock sources`, but a copy stays behind its first piece until the process is told to stop.

python -m tests.chaos.held_copies sources --broker ...
"""

import time
from collections.abc import Callable

from producers.sources.files.work import Location
from producers.store.blobs import Blobs
from workers.cli import main


def held(location: Location, found: object, blobs: Blobs, blob: str, stopped: Callable[[], bool]) -> int:
    pieces = 0

    def asked() -> bool:
        nonlocal pieces
        pieces += 1
        while pieces > 1 and not stopped():
            time.sleep(0.01)
        return stopped()

    return copy(location, found, blobs, blob, asked)  # type: ignore[arg-type]


if __name__ == "__main__":
    copy, Location.copy = Location.copy, held  # type: ignore[method-assign, assignment]
    main()
