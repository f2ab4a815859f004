"""The ring between a worker and its engine's process: whole records, in order, whatever happens to the writer."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from tests.waiting import until
from workers.engine_process.ring import MAX_NAMES, RING_BYTES, Ring


@contextmanager
def forked(work: Callable[[], None]) -> Iterator[int]:
    """A process that does this and then waits to be killed."""
    pid = os.fork()
    if pid == 0:
        try:
            work()
            signal.pause()
        finally:
            os._exit(1)
    try:
        yield pid
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def records(ring: Ring, count: int) -> list[bytes]:
    """So many records, as they come."""
    all_records: list[bytes] = []

    def come() -> bool:
        all_records.extend(ring.read())
        return len(all_records) >= count

    until(come)
    return all_records


def content(number: int) -> bytes:
    """A record of its own length: none, a few bytes, more than the ring holds."""
    return bytes([number % 251]) * (number * 97 if number % 8 else 0) + b"x" * (number == 20) * (2 * RING_BYTES + 5)


def test_records_of_another_process_come_whole_and_in_order() -> None:
    ring = Ring()

    def write() -> None:
        for number in range(40):
            ring.write(content(number), lambda: None)

    with forked(write):
        assert records(ring, 40) == [content(number) for number in range(40)]


def test_a_record_whose_writer_is_killed_in_the_middle_never_was() -> None:
    ring = Ring()

    def write() -> None:
        ring.write(b"whole", lambda: None)
        ring.write(b"x" * 2 * RING_BYTES, lambda: None)  # waits for ever, with its half there

    with forked(write) as pid:
        assert records(ring, 1) == [b"whole"]
        until(lambda: ring._unread or ring.read())
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, os.WNOHANG)
        assert ring.read() == []


@pytest.mark.parametrize("count", [0, 3, MAX_NAMES, MAX_NAMES + 1])
def test_a_step_has_the_names_that_were_given_last(count: int) -> None:
    ring = Ring()
    for numbers in ([7], list(range(count))):
        ring.name(numbers)
    assert ring.names() == (list(range(count)) if count <= MAX_NAMES else None)
    assert bool(ring.since) == bool(count)
