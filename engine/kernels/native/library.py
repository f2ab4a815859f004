"""The compiled kernels: which builds there are, which of them this CPU runs, and the C functions of the best one."""

from __future__ import annotations

import ctypes
import logging
import os
import platform
import struct
import weakref
from collections.abc import Callable
from ctypes import c_float, c_int, c_int64, c_void_p
from functools import cache
from pathlib import Path

import torch

from engine.errors import EngineError

logger = logging.getLogger("penstock.engine")

_FOLDER = Path(__file__).parent
#: penstock_version() of the source that this file calls.
VERSION = 13
#: Instruction set -> whether the CPU has it; the best one first.
_BUILDS: dict[str, Callable[[], bool]] = {
    "avx512bf16": lambda: torch.cpu._is_avx512_supported() and torch.cpu._is_avx512_bf16_supported(),
    "avx512": torch.cpu._is_avx512_supported,
    "avx2": torch.cpu._is_avx2_supported,
}
#: Where the table of sections begins, an entry's size, and how many there are: System V ABI, ELF-64 header.
_ELF64 = struct.Struct("<40xQ10xHH2x")
#: How long idle threads look for the next call before they sleep: calls of one step come within tens of microseconds.
_SPIN_US = 100
_P, _L, _I, _F = c_void_p, c_int64, c_int, c_float
_SIGNATURES: dict[str, list[type]] = {
    "penstock_free": [_P],
    "penstock_pack": [_P, _P, _P, _I, _L, _L],
    "penstock_linear": [_P, _P, _P, _P, _P, _I, _L, _L, _L],
    "penstock_peaks": [_P, _P, _P, _P, _I, _L, _L, _L, _P, _P],
    "penstock_candidates": [_P, _P, _P, _P, _L, _L, _L, _P, _P],
    "penstock_norm": [_P, _P, _P, _P, _P, _L, _L, _F],
    "penstock_norm_heads": [_P, _P, _P, _P, _L, _L, _L, _L, _F],
    "penstock_rope_and_write": [_P, _P, _P, _P, _P, _P, _I, _P, _L, _L, _L, _L, _L],
    "penstock_gate": [_P, _P, _P, _I, _L, _L],
    "penstock_attention": [_P, _P, _L, _P, _P, _I, _P, _P, _P, _P, _L, _P, *[_L] * 6, _F, _F, _P],
    "penstock_layers": [_P, _P, _L, _P],
}


class Library:
    """One build's functions, as native/penstock.cpp describes them; pointers and sizes are not checked."""

    def __init__(self, path: Path, isa: str) -> None:
        """Raises OSError where the file is missing, not whole or does not load, or is not of this version."""
        self.isa = isa
        _refuse_part(path)
        found = ctypes.CDLL(str(path))
        try:
            version = found.penstock_version()
            if version != VERSION:
                raise OSError(f"{path} is of version {version}, this is {VERSION}: build it again")
            self._bind(found)
        except AttributeError as error:
            raise OSError(f"{path} is not what it should be ({error}): build it again") from error

    def _bind(self, found: ctypes.CDLL) -> None:
        self.columns: int = found.penstock_columns()
        """Outputs of a panel of packed weights."""
        self.rounds = bool(found.penstock_rounds())
        """Whether products by weights in bf16 round the rows to bf16 too."""
        self.pool = found.penstock_pool
        self.pool.argtypes, self.pool.restype = [_I, _I], c_void_p
        for name, arguments in _SIGNATURES.items():
            function = getattr(found, name)
            function.argtypes, function.restype = arguments, None
        self.free = found.penstock_free
        self.pack = found.penstock_pack
        self.linear = found.penstock_linear
        self.peaks = found.penstock_peaks
        self.candidates = found.penstock_candidates
        self.norm = found.penstock_norm
        self.norm_heads = found.penstock_norm_heads
        self.rope_and_write = found.penstock_rope_and_write
        self.gate = found.penstock_gate
        self.attention = found.penstock_attention
        self.layers = found.penstock_layers


def _refuse_part(path: Path) -> None:
    """Raises OSError where the end of the file is missing, as after a build that was killed: loading what is mapped but
    not there would end this process without a word."""
    with path.open("rb") as file:
        head = file.read(_ELF64.size)
        size = file.seek(0, os.SEEK_END)
    if len(head) < _ELF64.size:
        raise OSError(f"{path} is cut off: build it again")
    # The linker writes the table of sections last.
    table, entry, entries = _ELF64.unpack(head)
    if size < table + entry * entries:
        raise OSError(f"{path} is cut off: build it again")


class Pool:
    """Threads that share each call's work; whoever calls with its address keeps it."""

    def __init__(self, library: Library, threads: int) -> None:
        """`threads` has the caller's in it. Raises EngineError where the system does not give so many."""
        self.threads = threads
        address = library.pool(threads, _SPIN_US)
        if address is None:
            raise EngineError(
                f"the system does not start {threads - 1} more threads to compute with: take fewer (--threads), or "
                "raise its limit of processes"
            )
        self.address: int = address
        weakref.finalize(self, library.free, self.address)


@cache
def load_library() -> Library | None:
    """The best build for this CPU; None where there is none. Where it is not what the CPU could do, a line in the log
    says why."""
    reasons = []
    for isa, runs in _BUILDS.items():
        if platform.machine().lower() not in ("x86_64", "amd64") or not runs():
            continue
        path = _FOLDER / f"_{isa}.so"
        try:
            found = Library(path, isa)
        except OSError as error:
            note = path.with_suffix(".txt")
            reasons.append(f"{path} was not built: {note.read_text()}" if note.exists() else str(error))
            continue
        if reasons:
            logger.warning("native CPU kernels for %s are taken, there were faster ones: %s", isa, "; ".join(reasons))
        return found
    if not reasons:
        reasons.append(f"they are for x86-64 with AVX2 or more, and this CPU is {platform.machine()} without")
    logger.warning("native CPU kernels cannot be used, torch's are taken, which are slower: %s", "; ".join(reasons))
    return None
