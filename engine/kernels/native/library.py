"""Loads the compiled kernels: finds the best build that this CPU can run, and binds its C functions."""

from __future__ import annotations

import ctypes
import logging
import os
import platform
import struct
import weakref
from collections.abc import Callable
from ctypes import c_char_p, c_float, c_int, c_int64, c_void_p
from functools import cache
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from engine.errors import EngineError

logger = logging.getLogger("penstock.engine")

_FOLDER = Path(__file__).parent
#: The penstock_version() that this file expects.
VERSION = 24
#: The kinds of numbers, by the name of their type.
_KINDS: Final = {"float32": 0, "bfloat16": 1, "int8": 2, "fp8": 3}
_PAIRED: Final = 4
#: A paired cache has whole panels of this many places, and heads of whole steps of this many dimensions.
_PANEL, _STEP = 16, 32


def _has_bf16() -> bool:
    """True if the CPU has AVX-512 and what setup.py calls BF16."""
    cpu = torch.cpu
    return cpu._is_avx512_supported() and cpu._is_avx512_bf16_supported() and cpu._is_vnni_supported()


#: Maps each instruction set to a check whether the CPU has it. The best one is first. A build may still be refused by
#: the system (penstock_refused).
_BUILDS: dict[str, Callable[[], bool]] = {
    "avx512amx": lambda: _has_bf16() and torch.cpu._is_amx_tile_supported(),
    "avx512bf16": _has_bf16,
    "avx512": torch.cpu._is_avx512_supported,
    "avx2": torch.cpu._is_avx2_supported,
}
#: The ELF-64 header (System V ABI): the offset of the section table, the size of an entry, the number of entries.
_ELF64 = struct.Struct("<40xQ10xHH2x")
#: The time in microseconds for which idle threads poll for the next call before they sleep. The calls of one step come
#: within tens of microseconds.
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
    "penstock_activate": [_P, _P, _P, _I, _L, _L],
    "penstock_layer_norm": [_P, _P, _P, _P, _P, _P, _L, _L, _F],
    "penstock_attend_unmasked": [_P, _P, _P, _L, _L, _L, _L, _P, _L, _L, _F, _P],
    "penstock_attention": [_P, _P, _L, _P, _P, _I, _P, _P, _P, _P, _L, _P, *[_L] * 6, _F, _F, _P],
    "penstock_route": [_P, _P, _P, _L, _P, _P],
    "penstock_experts": [_P, _P, _P, _P, _L, _P, _P],
    "penstock_low_rank": [_P, _P, _P, _L, _P, _L, _P, _L],
    "penstock_layers": [_P, _P, _L, _P],
    "penstock_peaks_of_ranks": [_P, _P, _P, _P, _I, _L, _L, _L, _P, _P, _L, _P],
    "penstock_free_exchange": [_P],
    "penstock_fail_ranks": [_P],
    "penstock_sum": [_P, _P, _P, _L],
    "penstock_send": [_P, c_char_p, _L],
    "penstock_take": [_P, _L, _P, _L],
    "penstock_gather": [_P, _L, _P, _L, _P],
    "penstock_carry": [_P, _L, _I],
    "penstock_deliver": [_P, _L, _I],
    "penstock_layers_of_rank": [_P, _P, _L, _P, _P, _I],
}


class Library:
    """The functions of one build, as native/penstock.cpp describes them. Pointers and sizes are not checked."""

    def __init__(self, path: Path, isa: str) -> None:
        """Raises OSError if the file is missing, truncated, of another version or cannot be loaded, or if the system
        does not let this process use its instructions."""
        self.isa = isa
        _refuse_part(path)
        library = ctypes.CDLL(str(path))
        try:
            version = library.penstock_version()
            if version != VERSION:
                raise OSError(f"{path} is of version {version}, this is {VERSION}: build it again")
            if refused := library.penstock_refused():
                raise OSError(f"the system does not let this process use what {path} needs ({os.strerror(refused)})")
            self._bind(library)
        except AttributeError as error:
            raise OSError(f"{path} is not what it should be ({error}): build it again") from error

    def _bind(self, library: ctypes.CDLL) -> None:
        self.columns: int = library.penstock_columns()
        """The outputs of one panel of packed weights."""
        self.lanes: int = library.penstock_lanes()
        """The floats of a vector."""
        self.adapter_pairs = bool(library.penstock_adapter_pairs())
        """Whether adapters' matrices in bf16 are packed by pairs, as adapters.h says."""
        self.rounds = bool(library.penstock_rounds())
        """Whether products with bf16 weights round the rows to bf16 too."""
        self.fours = bool(library.penstock_fours())
        """Whether weights of 4 and 8 bits are packed by fours of inputs, as quantised_amx.h says."""
        self.paired = bool(library.penstock_paired())
        """Whether caches in bf16 may be paired, as paired.h says; `Storage` has which."""
        self.pool = library.penstock_pool
        self.pool.argtypes, self.pool.restype = [_I, _I], c_void_p
        for name, arguments in _SIGNATURES.items():
            function = getattr(library, name)
            function.argtypes, function.restype = arguments, None
        self.free = library.penstock_free
        self.pack = library.penstock_pack
        self.linear = library.penstock_linear
        self.peaks = library.penstock_peaks
        self.candidates = library.penstock_candidates
        self.norm = library.penstock_norm
        self.norm_heads = library.penstock_norm_heads
        self.rope_and_write = library.penstock_rope_and_write
        self.gate = library.penstock_gate
        self.activate = library.penstock_activate
        self.layer_norm = library.penstock_layer_norm
        self.attend_unmasked = library.penstock_attend_unmasked
        self.attention = library.penstock_attention
        self.route = library.penstock_route
        self.experts = library.penstock_experts
        self.low_rank = library.penstock_low_rank
        self.layers = library.penstock_layers
        self._bind_ranks(library)

    def _bind_ranks(self, library: ctypes.CDLL) -> None:
        self.exchange = library.penstock_exchange
        self.exchange.argtypes, self.exchange.restype = [_P, *[_L] * 4], c_void_p
        self.ranks_failed = library.penstock_ranks_failed
        self.ranks_failed.argtypes, self.ranks_failed.restype = [_P], _I
        self.receive = library.penstock_receive
        self.receive.argtypes, self.receive.restype = [_P, _L], _L
        self.free_exchange = library.penstock_free_exchange
        self.fail_ranks = library.penstock_fail_ranks
        self.sum = library.penstock_sum
        self.send = library.penstock_send
        self.take = library.penstock_take
        self.gather = library.penstock_gather
        self.carry = library.penstock_carry
        self.deliver = library.penstock_deliver
        self.layers_of_rank = library.penstock_layers_of_rank
        self.peaks_of_ranks = library.penstock_peaks_of_ranks


def _refuse_part(path: Path) -> None:
    """Raises OSError if the file or its end is missing, as after a build that was killed. Loading a file without its
    end would crash this process without a message."""
    if not path.is_file():
        raise FileNotFoundError(f"{path} is missing: build it again")
    with path.open("rb") as file:
        head = file.read(_ELF64.size)
        size = file.seek(0, os.SEEK_END)
    if len(head) < _ELF64.size:
        raise OSError(f"{path} is cut off: build it again")
    # The linker writes the section table last.
    table, entry, entries = _ELF64.unpack(head)
    if size < table + entry * entries:
        raise OSError(f"{path} is cut off: build it again")


class Pool:
    """A pool of threads that share each call's work. The caller must keep this object alive while it uses the
    address."""

    def __init__(self, library: Library, threads: int) -> None:
        """`threads`: the number including the caller's. Raises EngineError if the system does not start that many."""
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
    """Load the best build for this CPU. None if there is none. If a better one could not be loaded, it logs the
    reason."""
    reasons = []
    for isa, runs in _BUILDS.items():
        if platform.machine().lower() not in ("x86_64", "amd64") or not runs():
            continue
        path = _FOLDER / f"_{isa}.so"
        try:
            library = Library(path, isa)
        except OSError as error:
            note = path.with_suffix(".txt")
            reasons.append(f"{path} was not built: {note.read_text().strip()}" if note.exists() else str(error))
            continue
        if reasons:
            logger.warning("native CPU kernels for %s are taken, there were faster ones: %s", isa, "; ".join(reasons))
        return library
    if not reasons:
        reasons.append(f"they are for x86-64 with AVX2 or more, and this CPU is {platform.machine()} without")
    logger.warning("native CPU kernels cannot be used, torch's are taken, which are slower: %s", "; ".join(reasons))
    return None


class Storage:
    """The storage kind of one kernel set's KV caches, as stored.h has the kinds."""

    def __init__(self, library: Library, name: str) -> None:
        """`name`: float32, bfloat16, int8 or fp8."""
        self._kind, self._pairs = _KINDS[name], library.paired and name == "bfloat16"

    def kind(self, cache: Tensor) -> int:
        """The kind of `cache`, [..., blocks, block_size, kv_heads, width].

        This is the one place that decides which caches are paired (paired.h). A cache has one shape for life, so it is
        written and read alike. Others of the same type keep the order of their shape, and attention in fp32.
        """
        block, _, width = cache.shape[-3:]
        return _PAIRED if self._pairs and block % _PANEL == 0 and width % _STEP == 0 else self._kind
