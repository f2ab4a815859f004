"""CUDA graphs of pure decode steps: recorded ahead or at first use, then replayed."""

from __future__ import annotations

import bisect
import gc
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from itertools import chain
from typing import Protocol

import torch

from engine.execution.device.inputs import Shape

logger = logging.getLogger("penstock.engine")

#: Contexts of up to this many tokens share a recording, then those up to four times as many, and so on. The bound
#: limits into how many parts a recorded kernel splits its work, not what it reads.
FEWEST_PLACES = 1024
#: Rows with adapters in up to this many tiles share a recording, then those in up to eight times as many, and so on.
FEWEST_TILES = 8


class Recording(Protocol):
    def replay(self) -> None:
        """Repeat the recorded work in the same memory."""


#: Records the device work of a call by making the call once or more, so the call must be repeatable.
Record = Callable[[Callable[[], None]], Recording]


class Recorded:
    """A stand-in for devices without graphs: replaying makes the recorded call again."""

    def __init__(self, run: Callable[[], None]) -> None:
        run()
        self._run = run

    def replay(self) -> None:
        self._run()


class CudaRecorder:
    """Records CUDA graphs, all in one memory pool: steps run one after another, so that each may use the whole pool."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, run: Callable[[], None]) -> Recording:
        here = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(here)
        try:
            with torch.cuda.stream(self._stream):
                # First-use work (compiling kernels, allocating workspaces) cannot be recorded, so do it before.
                run()
        finally:
            # Also after a failed call, because the step then runs without a recording in the same memory.
            here.wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        try:
            # Other threads of this process may use the device meanwhile.
            with torch.cuda.graph(graph, self._pool, self._stream, capture_error_mode="thread_local"):
                run()
        except BaseException:
            # If ending the capture fails, torch stays on the capture stream, which waits for no other. Before 2.12 its
            # allocator also behaves as if still recording and refuses to free memory (pytorch/pytorch#180395).
            torch.cuda.set_stream(here)
            with suppress(RuntimeError):  # raised if the allocator has already ended it
                torch._C._cuda_endAllocateToPool(self._stream.device_index, self._pool)
            raise
        return graph


def recorder(device: torch.device) -> Record:
    return CudaRecorder(device) if device.type == "cuda" else Recorded


def batch_sizes(largest: int) -> list[int]:
    """The batch sizes that are recorded, up to `largest`. Large sizes are farther apart, because padding costs them
    less."""
    sizes = [1, 2, 4, *range(8, 64, 8), *range(64, 256, 16), *range(256, 512, 32), *range(512, largest, 64)]
    return [size for size in sizes if size < largest] + [largest]


class DecodeGraphs:
    """The recorded decode steps of one runner. If recording fails once, nothing more is recorded: other steps then run
    without a recording, more slowly but with the same results."""

    def __init__(
        self, record: Record, *, slots: int, most_places: int, device: torch.device, alone: bool = True
    ) -> None:
        """`most_places`: the tokens of the longest sequence. `alone`: whether a step runs here alone; among ranks that
        sum within it, each of which has to run it as often as the others, a recording that fails is an error."""
        self._alone = alone
        self._record = record
        self._sizes = batch_sizes(slots)
        self._most_places = most_places
        self._device = device
        self._version = -1
        self._recordings: dict[Shape, Recording] = {}
        self._fails = False
        # Shapes for whose recording there was no memory.
        self._too_large: set[Shape] = set()
        #: The device memory of all recordings, in bytes.
        self.bytes = 0

    def __len__(self) -> int:
        return len(self._recordings)

    def padded(self, shape: Shape) -> Shape | None:
        """The shape whose recording serves a step of this shape. None if there is no such recording and never will
        be."""
        if not shape.decodes:
            return None
        rows = self._sizes[bisect.bisect_left(self._sizes, shape.rows)]
        places = tuple(self._places(length) for length in shape.most_places)
        padded = Shape(rows, rows, 1, places, _room(shape.adapter_tiles, rows))
        excluded = self._fails or padded in self._too_large
        return None if excluded and padded not in self._recordings else padded

    def _places(self, length: int) -> int:
        bound = FEWEST_PLACES
        while bound < length:
            bound *= 4
        return min(bound, max(self._most_places, length))

    def unrecorded(
        self, windows: Sequence[int | None], block_size: int, longest: int, version: int, *, adapters: bool
    ) -> Shape | None:
        """The next shape to record, for contexts of up to `longest` tokens. None if all are recorded.

        Short contexts come first, and within each the most sequences, because later recordings then fit into the memory
        of earlier ones. `windows` are the windows of the KV groups. `adapters`: whether to record steps with adapters,
        too: after all others.
        """
        if self._fails:
            return None
        recorded = self._recordings if version == self._version else {}
        plain = self._shapes(windows, block_size, longest)
        adapted = (
            replace(shape, adapter_tiles=tiles)
            for shape in (self._shapes(windows, block_size, longest) if adapters else ())
            for tiles in sorted({_room(tiles, shape.rows) for tiles in (1, FEWEST_TILES + 1, shape.rows)})
        )
        return next(
            (shape for shape in chain(plain, adapted) if shape not in recorded and shape not in self._too_large), None
        )

    def _shapes(self, windows: Sequence[int | None], block_size: int, longest: int) -> Iterator[Shape]:
        bound = FEWEST_PLACES
        while True:
            length = min(bound, longest)
            lengths = [length if window is None else min(length, window + block_size) for window in windows]
            for rows in reversed(self._sizes):
                yield Shape(rows, rows, 1, tuple(map(self._places, lengths)))
            if bound >= longest:
                return
            bound *= 4

    def run(self, shape: Shape, version: int, step: Callable[[Shape], None]) -> None:
        """Run `step(shape)`, from a recording if there is one. All its work must be on the device. A change of
        `version` means that it uses other memory, which makes all recordings invalid."""
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
        if self._device.type == "cuda":
            torch.cuda.empty_cache()  # as each recording does: what that gives back must not count
        before = _reserved(self._device)
        try:
            with _garbage_collection_paused():
                recording = self._record(lambda: step(shape))
        except torch.OutOfMemoryError:
            if not self._alone:
                raise
            self._too_large.add(shape)
            logger.warning("there is no memory to record decode steps of %d sequences; they run without", shape.rows)
            return None
        except Exception:
            if not self._alone:
                raise
            self._fails = True
            logger.exception(
                "a decode step could not be recorded as a CUDA graph; what is not recorded by now runs without"
            )
            return None
        self._recordings[shape] = recording
        reserved = _reserved(self._device) - before
        self.bytes += reserved
        logger.info(
            "recorded decode steps of %d sequences with up to %s places: %.1f MiB, %.1f MiB for all %d",
            shape.rows,
            "/".join(map(str, shape.most_places)),
            reserved / 2**20,
            self.bytes / 2**20,
            len(self._recordings),
        )
        return recording


def _room(tiles: int, rows: int) -> int:
    """The tiles that a recording for so many has room for. No tile is without a row."""
    if not tiles:
        return 0
    bound = FEWEST_TILES
    while bound < tiles:
        bound *= 8
    return min(bound, rows)


@contextmanager
def _garbage_collection_paused() -> Iterator[None]:
    """Stop Python's garbage collector during a recording: it must not free device memory then. The existing objects are
    frozen, so that torch's own collection before a recording does not walk them."""
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
