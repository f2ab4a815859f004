"""Steps in which every sequence decodes: recorded ahead or at their first use, replayed from then on."""

from __future__ import annotations

import bisect
import gc
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Protocol

import torch

from engine.execution.device.inputs import Shape

logger = logging.getLogger("penstock.engine")

#: Contexts share a recording up to so many places, then up to four times as many, and so on: a bound on lengths is a
#: bound on the work that a recorded kernel may split off, and not on what it reads.
FEWEST_PLACES = 1024


class Recording(Protocol):
    def replay(self) -> None:
        """Do again what was recorded, in the same memory."""


#: Records what a call does on the device, by doing it once or more: only to be given what may be done again.
Record = Callable[[Callable[[], None]], Recording]


class Recorded:
    """Where there are no graphs: replaying calls again what was recorded."""

    def __init__(self, run: Callable[[], None]) -> None:
        run()
        self._run = run

    def replay(self) -> None:
        self._run()


class CudaRecorder:
    """Records CUDA graphs, all in one memory pool: their steps follow each other, so that each may use it all."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, run: Callable[[], None]) -> Recording:
        here = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(here)
        try:
            with torch.cuda.stream(self._stream):
                # What is only done at first use (kernels compiled, workspaces taken) cannot be recorded.
                run()
        finally:
            # Also of one that broke off: who runs without works in the same memory.
            here.wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        try:
            # Other threads of this process may use the device meanwhile.
            with torch.cuda.graph(graph, self._pool, self._stream, capture_error_mode="thread_local"):
                run()
        except BaseException:
            # Where ending the capture fails torch stays on its stream, which waits for no other; and before 2.12 its
            # allocator goes on as if recording, and refuses to give memory back (pytorch/pytorch#180395).
            torch.cuda.set_stream(here)
            with suppress(RuntimeError):  # it has ended that
                torch._C._cuda_endAllocateToPool(self._stream.device_index, self._pool)
            raise
        return graph


def recorder(device: torch.device) -> Record:
    return CudaRecorder(device) if device.type == "cuda" else Recorded


def batch_sizes(most: int) -> list[int]:
    """Sequences of the steps that are recorded, up to `most`: the farther apart the less a row more costs."""
    sizes = [1, 2, 4, *range(8, 64, 8), *range(64, 256, 16), *range(256, 512, 32), *range(512, most, 64)]
    return [size for size in sizes if size < most] + [most]


class DecodeGraphs:
    """Of one runner. Where recording fails once, nothing more is recorded: steps without a recording then run as they
    are, which is slower and as good."""

    def __init__(self, record: Record, *, slots: int, most_places: int, device: torch.device) -> None:
        """`most_places`: tokens of the longest sequence."""
        self._record = record
        self._sizes = batch_sizes(slots)
        self._most_places = most_places
        self._device = device
        self._version = -1
        self._recordings: dict[Shape, Recording] = {}
        self._fails = False
        # For which there was no memory.
        self._too_large: set[Shape] = set()
        #: Memory that the device has taken for them.
        self.bytes = 0

    def __len__(self) -> int:
        return len(self._recordings)

    def padded(self, shape: Shape) -> Shape | None:
        """The shape whose recording serves a step of this shape; None where there is none and will be none."""
        if not shape.decodes:
            return None
        rows = self._sizes[bisect.bisect_left(self._sizes, shape.rows)]
        padded = Shape(rows, rows, 1, tuple(self._places(most) for most in shape.most_places))
        left = self._fails or padded in self._too_large
        return None if left and padded not in self._recordings else padded

    def _places(self, most: int) -> int:
        bound = FEWEST_PLACES
        while bound < most:
            bound *= 4
        return min(bound, max(self._most_places, most))

    def unrecorded(self, windows: Sequence[int | None], block_size: int, longest: int, version: int) -> Shape | None:
        """The first of all steps with contexts of up to `longest` tokens that has no recording and may have one.

        Short contexts come first, and of each the most sequences, since later recordings fit into the memory that
        earlier ones have taken. `windows` are those of the KV groups.
        """
        if self._fails:
            return None
        recorded = self._recordings if version == self._version else {}
        every = self._shapes(windows, block_size, longest)
        return next((shape for shape in every if shape not in recorded and shape not in self._too_large), None)

    def _shapes(self, windows: Sequence[int | None], block_size: int, longest: int) -> Iterator[Shape]:
        bound = FEWEST_PLACES
        while True:
            most = min(bound, longest)
            held = [most if window is None else min(most, window + block_size) for window in windows]
            for rows in reversed(self._sizes):
                yield Shape(rows, rows, 1, tuple(map(self._places, held)))
            if bound >= longest:
                return
            bound *= 4

    def run(self, shape: Shape, version: int, step: Callable[[Shape], None]) -> None:
        """Do `step(shape)`, from a recording if there is one. It must do all its work on the device, and in memory of
        which `version` says whether it is still the same."""
        if version != self._version:
            self._recordings.clear()
            self._version = version
        recording = self._recordings.get(shape)
        if recording is None:
            recording = self._recorded(shape, step)
        if recording is None:
            step(shape)
        else:
            recording.replay()

    def _recorded(self, shape: Shape, step: Callable[[Shape], None]) -> Recording | None:
        before = _reserved(self._device)
        try:
            with _collector_held():
                recording = self._record(lambda: step(shape))
        except torch.OutOfMemoryError:
            self._too_large.add(shape)
            logger.warning("there is no memory to record decode steps of %d sequences; they run without", shape.rows)
            return None
        except Exception:
            self._fails = True
            logger.exception(
                "a decode step could not be recorded as a CUDA graph; what is not recorded by now runs without"
            )
            return None
        self._recordings[shape] = recording
        taken = _reserved(self._device) - before
        self.bytes += taken
        logger.info(
            "recorded decode steps of %d sequences with up to %s places: %.1f MiB, %.1f MiB for all %d",
            shape.rows,
            "/".join(map(str, shape.most_places)),
            taken / 2**20,
            self.bytes / 2**20,
            len(self._recordings),
        )
        return recording


@contextmanager
def _collector_held() -> Iterator[None]:
    """Python's garbage collector neither frees what is the device's while it records, nor walks all that is loaded
    when torch calls it before."""
    enabled, freezes = gc.isenabled(), gc.get_freeze_count() == 0
    gc.disable()
    if freezes:
        gc.freeze()
    try:
        yield
    finally:
        if freezes:
            gc.unfreeze()
        if enabled:
            gc.enable()


def _reserved(device: torch.device) -> int:
    return torch.cuda.memory_reserved(device) if device.type == "cuda" else 0
