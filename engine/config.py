"""The settings of one engine: checked when made, fixed for its life."""

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

#: The upper limit of ageing_s: in practice, requests never age.
_MAX_AGEING_S = 1e9
_DTYPES = ("auto", "float32", "bfloat16", "float16")
_DEVICES = ("auto", "cpu", "cuda")
_KERNELS = ("auto", "reference", "ragged", "sdpa", "cpu", "native", "triton")
_QUANTIZATIONS = ("none", "fp8")
_KV_CACHE_DTYPES = ("auto", "int8", "fp8")
_SPECULATE = ("none", "lookup", "draft")
#: The most draft tokens that one sequence may have in one step.
MAX_SPECULATE_TOKENS = 16


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Settings of one engine. Raises EngineError naming the setting, the value and what is allowed.

    If a default is None, the engine picks a value that suits the device, the model or the free memory.
    """

    dtype: DType = "auto"
    device: Device = "auto"
    quantization: Quantization = "none"
    """Quantises, on loading, the weights of all matrix products but the last. "fp8" stores 8-bit floats with one scale
    per output channel, and scales activations per token. It needs a CUDA device of compute capability 8.9 or more."""
    deterministic: bool = False
    """Whether a sequence's output depends on nothing but the sequence itself, to the bit. It is then independent of the
    rest of the batch, of prefill chunks, prefix-cache hits, preemption and overlap. Engines of equal fingerprint then
    give identical output. docs/performance.md gives the cost."""
    max_num_seqs: int = 64
    """The most sequences in one batch. A request with n choices makes n sequences."""
    max_num_batched_tokens: int | None = None
    """The most tokens computed in one step over all sequences. It must be at least max_num_seqs, so that every decode
    can go on."""
    unhurried_tokens: int | None = None
    """The most tokens of a step that computes no prompt of the priority tier. It must be at least max_num_seqs; None
    means max_num_batched_tokens. A lower value shortens the steps that a priority request may have to wait for. The
    priority request's own prompt may still fill max_num_batched_tokens."""
    kv_cache_bytes: int | None = None
    """Memory of the KV cache, in bytes. None takes a bounded part of the free memory."""
    kv_cache_dtype: KvCacheDType = "auto"
    """The data type of the KV cache. "auto" is the type that the kernels compute with. "int8", with one scale for each
    key and value of a head, and "fp8" (e4m3) take a half or a quarter of the memory, so that more context fits. Both
    need kernels="native" or "triton", or "cpu", where they slow attention. On a GPU they exclude deterministic mode,
    and "fp8" needs compute capability 8.9 or more."""
    memory_share: float = 0.85
    """The part of a GPU's memory that weights, steps and KV cache may take together, if kv_cache_bytes is None. The
    engine measures a step's memory by running the largest steps. The remaining part is a reserve."""
    kernels: KernelSet = "auto"
    """The kernel set that computes the model. "auto" picks "triton" on CUDA, or "sdpa" if triton is not installed. On a
    CPU it picks "native" (Penstock's own C++), or "cpu" (oneDNN, torch) if that was not built at install. Tests use
    "reference" (plain torch) and "ragged" (the same under the runner for CUDA)."""
    graphs: bool = True
    """Whether pure decode steps are recorded as CUDA graphs, before they are needed, and replayed. Without graphs the
    host launches each kernel, which takes longer than the kernels themselves at small batch sizes."""
    block_size: int = 16
    """The number of tokens in one KV block."""
    max_model_len: int | None = None
    """The most tokens of prompt and output together. None means the model's own context length."""
    enable_prefix_caching: bool = True
    ageing_s: float = 30.0
    """A waiting request rises by one tier for each `ageing_s` seconds."""
    threads: int | None = None
    """The number of CPU threads. None means one for each core, within a container's limit of processor time. After each
    call the threads poll for work for a tenth of a millisecond and then sleep. If another process keeps a core busy,
    one thread less may be faster."""
    overlap: int | None = None
    """The number of steps, 0 or 1, that are planned and launched before the results of the running step are known. None
    means 1 on CUDA, where it keeps the device busy, and 0 on a CPU, which plans and computes with the same cores. The
    output is the same. A sequence whose end could not be foreseen is computed for one step more."""
    speculate: Speculate = "none"
    """The source of draft tokens, several of which the model then checks in one step. "lookup" takes the tokens that
    followed the same words earlier in the sequence; "draft" runs `draft_model`. The output is the same (to the bit in
    deterministic mode)."""
    draft_model: str | None = None
    """The folder of a smaller model with the same vocabulary, for speculate="draft"."""
    speculate_tokens: int = 5
    """The most draft tokens for one sequence in one step."""
    speculate_adaptive: bool = True
    """Whether the number of draft tokens adapts, down to none, to the acceptance rate and to the measured times of
    steps of each size. If false, the engine always drafts as many tokens as it may."""
    seed: int | None = None
    """The source of seeds for requests that have none. None gives different seeds at every start."""

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
