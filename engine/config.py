"""How an engine is set up: fixed for its life, checked when made."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from engine.errors import EngineError

DType = Literal["auto", "float32", "bfloat16", "float16"]
Device = Literal["auto", "cpu", "cuda"]
KernelSet = Literal["auto", "reference", "ragged", "sdpa", "cpu", "native", "triton"]
Quantization = Literal["none", "fp8"]
KvCacheDType = Literal["auto", "int8", "fp8"]
Speculate = Literal["none", "lookup", "draft"]

#: As good as never.
_MAX_AGEING_S = 1e9
_DTYPES = ("auto", "float32", "bfloat16", "float16")
_DEVICES = ("auto", "cpu", "cuda")
_KERNELS = ("auto", "reference", "ragged", "sdpa", "cpu", "native", "triton")
_QUANTIZATIONS = ("none", "fp8")
_KV_CACHE_DTYPES = ("auto", "int8", "fp8")
_SPECULATE = ("none", "lookup", "draft")
#: Tokens of a draft at most.
MAX_SPECULATE_TOKENS = 16


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Settings of one engine. Raises EngineError naming the setting, the value and what is allowed.

    Where a default is None the engine picks: what suits the device, the model or the free memory.
    """

    dtype: DType = "auto"
    device: Device = "auto"
    quantization: Quantization = "none"
    """Of the weights of all matrix products but the last, when they are loaded. "fp8": 8-bit floats with one scale for
    each output, activations with one for each token; on CUDA devices of compute capability 8.9 or more."""
    deterministic: bool = False
    """Whether a row's result depends on nothing but the row, to the bit: not on its neighbours in the batch, nor on how
    its prompt was cut into chunks, on prefix-cache hits, preemption or overlap. Between engines of equal fingerprint
    output is then the same wherever, and after whatever, it is made. What it costs: docs/performance.md."""
    max_num_seqs: int = 64
    """Sequences in one batch (a request with n choices makes n of them)."""
    max_num_batched_tokens: int | None = None
    """Tokens computed in one step over all sequences; at least max_num_seqs, so that every decode goes on."""
    unhurried_tokens: int | None = None
    """Tokens of a step in which no prompt of the priority tier is computed, at most; at least max_num_seqs. None:
    max_num_batched_tokens. Fewer make steps shorter that a priority request may have to wait for; its own prompt may
    still fill max_num_batched_tokens."""
    kv_cache_bytes: int | None = None
    """Memory for keys and values; None takes a bounded part of what is free."""
    kv_cache_dtype: KvCacheDType = "auto"
    """Of keys and values: "auto" is what the kernels compute with; "int8", with one scale for each key and value of a
    head, and "fp8" (e4m3) take a half or a quarter of the memory, so that as much more context fits. With
    kernels="native" or "triton", or "cpu", whose attention they slow; on a GPU not in deterministic mode, and "fp8"
    from compute capability 8.9 on."""
    memory_share: float = 0.85
    """On a GPU, the part of its memory that weights, steps and KV cache may take together where kv_cache_bytes is None.
    What a step takes is found out by running the largest ones; what is left is for what nobody foresees."""
    kernels: KernelSet = "auto"
    """By what the model is computed. On CUDA "triton", or "sdpa" where triton is not installed; on a CPU "native" (C++
    of our own), or "cpu" (oneDNN, torch) where that was not built at install; or what they are tested by: "reference"
    (plain torch) and "ragged" (the same under the runner that CUDA has)."""
    graphs: bool = True
    """Whether steps in which every sequence decodes are recorded as CUDA graphs, before they are needed, and
    replayed. Without, the host launches each kernel, which at small batches takes longer than the kernels."""
    block_size: int = 16
    """Tokens in one KV block."""
    max_model_len: int | None = None
    """Longest prompt + output, in tokens; None is the model's own context."""
    enable_prefix_caching: bool = True
    ageing_s: float = 30.0
    """Seconds of waiting that raise a request by one tier."""
    threads: int | None = None
    """CPU threads; None is one a core, as far as a container's limit of processor time goes. They look for work for a
    tenth of a millisecond after each call, and sleep then. Where others keep a core busy beside the engine, one less
    may give more."""
    overlap: int | None = None
    """Steps that are planned and launched before the results of the one that runs are known, 0 or 1. None is 1 on
    CUDA, where it keeps the device busy, and 0 on a CPU, which plans and computes with the same cores. The output is
    the same; a sequence whose end could not be foreseen is computed for one step more."""
    speculate: Speculate = "none"
    """Who guesses tokens, which are then computed several in one step: "lookup" finds what followed the same words
    before, "draft" asks `draft_model`. The output is the same (to the bit where it is deterministic)."""
    draft_model: str | None = None
    """Folder of a smaller model with the same vocabulary, for speculate="draft"."""
    speculate_tokens: int = 5
    """Tokens guessed at a time, at most."""
    speculate_adaptive: bool = True
    """Whether fewer are guessed, or none, where that is faster: by how often they are right, and by how long steps of
    each size are seen to take. Without, always as many as may be."""
    seed: int | None = None
    """Source of the seeds of requests that bring none; None is different at every start."""

    def __post_init__(self) -> None:
        _one_of("dtype", self.dtype, _DTYPES)
        _one_of("device", self.device, _DEVICES)
        _one_of("kernels", self.kernels, _KERNELS)
        _one_of("quantization", self.quantization, _QUANTIZATIONS)
        _one_of("kv_cache_dtype", self.kv_cache_dtype, _KV_CACHE_DTYPES)
        _one_of("speculate", self.speculate, _SPECULATE)
        if (self.speculate == "draft") != (self.draft_model is not None):
            raise EngineError(
                f"speculate={self.speculate!r} with draft_model={self.draft_model!r}: a draft model's folder goes with "
                f"speculate='draft', and with nothing else"
            )
        _integer("speculate_tokens", self.speculate_tokens, 1, MAX_SPECULATE_TOKENS)
        _integer("max_num_seqs", self.max_num_seqs, 1, 4096)
        _integer("block_size", self.block_size, 1, 1024)
        for name in ("max_num_batched_tokens", "unhurried_tokens"):
            tokens = getattr(self, name)
            if tokens is None:
                continue
            _integer(name, tokens, 1, 1 << 20)
            if tokens < self.max_num_seqs:
                raise EngineError(
                    f"{name}={tokens} is less than max_num_seqs={self.max_num_seqs}: a step must hold one token of "
                    f"every sequence; raise the first or lower the second"
                )
        if self.kv_cache_bytes is not None:
            _integer("kv_cache_bytes", self.kv_cache_bytes, 1, 1 << 50)
        if self.max_model_len is not None:
            _integer("max_model_len", self.max_model_len, 2, 1 << 31)
        if self.threads is not None:
            _integer("threads", self.threads, 1, 4096)
        if self.overlap is not None:
            _integer("overlap", self.overlap, 0, 1)
        if self.seed is not None:
            _integer("seed", self.seed, 0, (1 << 63) - 1)
        _flag("enable_prefix_caching", self.enable_prefix_caching)
        _flag("graphs", self.graphs)
        _flag("deterministic", self.deterministic)
        _flag("speculate_adaptive", self.speculate_adaptive)
        if isinstance(self.memory_share, bool) or not isinstance(self.memory_share, (int, float)):
            raise EngineError(f"memory_share={self.memory_share!r} must be a number")
        if not 0 < self.memory_share <= 1:
            raise EngineError(f"memory_share={self.memory_share!r} must be above 0, up to 1")
        if isinstance(self.ageing_s, bool) or not isinstance(self.ageing_s, (int, float)):
            raise EngineError(f"ageing_s={self.ageing_s!r} must be a number of seconds")
        # Compared before it is converted: no float holds an integer of 400 digits.
        if not 0.001 <= self.ageing_s <= _MAX_AGEING_S:
            raise EngineError(f"ageing_s={self.ageing_s!r} must be a number of seconds from 0.001 to 1e9")


def _one_of(name: str, value: object, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise EngineError(f"{name}={value!r} must be one of {', '.join(allowed)}")


def _flag(name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise EngineError(f"{name}={value!r} must be True or False")


def _integer(name: str, value: object, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise EngineError(f"{name}={value!r} must be an integer")
    if not low <= value <= high:
        raise EngineError(f"{name}={value!r} must be from {low} to {high}")
