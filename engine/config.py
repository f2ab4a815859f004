"""The settings of one engine: declared once, checked when made, fixed for its life."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal, get_args

from engine.bounds import Flag, Integer, Number, OneOf
from engine.declared import Option, checked
from engine.errors import EngineError, RequestError

DType = Literal["auto", "float32", "bfloat16", "float16"]
Device = Literal["auto", "cpu", "cuda"]
KernelSet = Literal["auto", "reference", "ragged", "sdpa", "cpu", "native", "triton"]
Quantization = Literal["none", "fp8"]
KvCacheDType = Literal["auto", "int8", "fp8"]
Speculate = Literal["none", "lookup", "draft"]

#: The most draft tokens that one sequence may have in one step.
MAX_SPECULATE_TOKENS = 16
_MAX_STEP_TOKENS = 1 << 20


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Settings of one engine. Raises EngineError naming the setting, the value and what is allowed.

    If a default is None, the engine picks a value that suits the device, the model or the free memory. A setting with
    an `Option` is one of `penstock worker`, `up`, `run` and others; its text is the one of `--help`.
    """

    max_num_seqs: Annotated[int, Integer(1, 4096), Option("Most sequences in one batch. Unset: 64.", serving=True)] = 64
    """The most sequences in one batch. A request with n choices makes n sequences."""
    max_num_batched_tokens: Annotated[
        int | None,
        Integer(1, _MAX_STEP_TOKENS),
        Option("Most tokens computed in one engine step.", name="--max-batched-tokens", serving=True),
    ] = None
    """The most tokens computed in one step over all sequences. It must be at least max_num_seqs, so that every decode
    can go on."""
    unhurried_tokens: Annotated[
        int | None,
        Integer(1, _MAX_STEP_TOKENS),
        Option(
            "Most tokens in a step that computes no prompt of the priority tier. A small number lets priority requests "
            "start sooner. Unset: --max-batched-tokens.",
            name="--max-non-priority-step-tokens",
            serving=True,
        ),
    ] = None
    """The most tokens of a step that computes no prompt of the priority tier. It must be at least max_num_seqs; None
    means max_num_batched_tokens. A lower value shortens the steps that a priority request may have to wait for. The
    priority request's own prompt may still fill max_num_batched_tokens."""
    kv_cache_bytes: Annotated[
        int | None, Integer(1, 1 << 50), Option("Memory for the KV cache, in bytes.", serving=True)
    ] = None
    """Memory of the KV cache, in bytes. None takes a bounded part of the free memory."""
    memory_share: Annotated[
        float,
        Number(0, 1, above=True),
        Option(
            "Share of the GPU's memory to use, unless --kv-cache-bytes is given. Unset: 0.85.",
            serving=True,
        ),
    ] = 0.85
    """The part of a GPU's memory that weights, steps and KV cache may take together, if kv_cache_bytes is None. The
    engine measures a step's memory by running the largest steps. The remaining part is a reserve."""
    dtype: Annotated[
        DType,
        OneOf(get_args(DType)),
        Option("Data type of weights and activations: auto, float32, bfloat16 or float16."),
    ] = "auto"
    quantization: Annotated[
        Quantization,
        OneOf(get_args(Quantization)),
        Option("none, or fp8: 8-bit weights and activations, on GPUs from compute capability 8.9."),
    ] = "none"
    """Quantises, on loading, the weights of all matrix products but the last. "fp8" stores 8-bit floats with one scale
    per output channel, and scales activations per token. It needs a CUDA device of compute capability 8.9 or more."""
    kv_cache_dtype: Annotated[
        KvCacheDType,
        OneOf(get_args(KvCacheDType)),
        Option("auto, or int8 or fp8: 8-bit keys and values, which leave memory for more context."),
    ] = "auto"
    """The data type of the KV cache. "auto" is the type that the kernels compute with. "int8", with one scale for each
    key and value of a head, and "fp8" (e4m3) take a half or a quarter of the memory, so that more context fits. Both
    need kernels="native" or "triton". On a GPU they exclude deterministic mode, and "fp8" needs compute capability 8.9
    or more."""
    deterministic: Annotated[
        bool,
        Flag(),
        Option(
            "Make outputs identical to the bit whatever runs beside a task, however its prompt is cut, and after "
            "interruptions. Slower."
        ),
    ] = False
    """Whether a sequence's output depends on nothing but the sequence itself, to the bit. It is then independent of the
    rest of the batch, of prefill chunks, prefix-cache hits, preemption and overlap. Engines of equal fingerprint then
    give identical output. docs/performance.md gives the cost."""
    speculate: Annotated[
        Speculate | None,
        OneOf(get_args(Speculate)),
        Option(
            "Speculative decoding: none, lookup (guess what followed the same words before) or draft (guess with a "
            "smaller model). The output stays the same. Unset: draft with --draft-model, else none."
        ),
    ] = None
    """The source of draft tokens, several of which the model then checks in one step. "lookup" takes the tokens that
    followed the same words earlier in the sequence; "draft" runs `draft_model`. The output is the same (to the bit in
    deterministic mode). None becomes "draft" with a draft model, else "none"."""
    draft_model: Annotated[
        str | None, Option("A smaller model that guesses tokens, named like MODEL; it must have the same vocabulary.")
    ] = None
    """The folder of a smaller model with the same vocabulary, for speculate="draft"."""
    speculate_tokens: Annotated[
        int,
        Integer(1, MAX_SPECULATE_TOKENS),
        Option(f"Most tokens guessed at a time, 1 to {MAX_SPECULATE_TOKENS}. Unset: 5."),
    ] = 5
    """The most draft tokens for one sequence in one step."""
    speculate_adaptive: Annotated[bool, Flag()] = True
    """Whether the number of draft tokens adapts, down to none, to the acceptance rate and to the measured times of
    steps of each size. If false, the engine always drafts as many tokens as it may."""
    device: Annotated[Device, OneOf(get_args(Device)), Option("Where the model runs: auto, cpu or cuda.")] = "auto"
    threads: Annotated[
        int | None,
        Integer(1, 4096),
        Option("CPU threads. Unset: the cores that the machine or container has."),
    ] = None
    """The number of CPU threads. None means one for each core, within a container's limit of processor time. After each
    call the threads poll for work for a tenth of a millisecond and then sleep. If another process keeps a core busy,
    one thread less may be faster."""
    kernels: Annotated[KernelSet, OneOf(get_args(KernelSet))] = "auto"
    """The kernel set that computes the model. "auto" picks "triton" on CUDA, or "sdpa" if triton is not installed. On a
    CPU it picks "native" (Penstock's own C++), or "cpu" (oneDNN, torch) if that was not built at install. Tests use
    "reference" (plain torch) and "ragged" (the same under the runner for CUDA)."""
    graphs: Annotated[bool, Flag()] = True
    """Whether pure decode steps are recorded as CUDA graphs, before they are needed, and replayed. Without graphs the
    host launches each kernel, which takes longer than the kernels themselves at small batch sizes."""
    block_size: Annotated[int, Integer(1, 1024)] = 16
    """The number of tokens in one KV block."""
    max_model_len: Annotated[int | None, Integer(2, 1 << 31)] = None
    """The most tokens of prompt and output together. None means the model's own context length."""
    enable_prefix_caching: Annotated[bool, Flag()] = True
    ageing_s: Annotated[float, Number(0.001, 1e9)] = 30.0
    """A waiting request rises by one tier for each `ageing_s` seconds. At the most, requests never age in practice."""
    overlap: Annotated[int | None, Integer(0, 1)] = None
    """The number of steps, 0 or 1, that are planned and launched before the results of the running step are known. None
    means 1 on CUDA, where it keeps the device busy, and 0 on a CPU, which plans and computes with the same cores. The
    output is the same. A sequence whose end could not be foreseen is computed for one step more."""
    seed: Annotated[int | None, Integer(0, (1 << 63) - 1)] = None
    """The source of seeds for requests that have none. None gives different seeds at every start."""

    def __post_init__(self) -> None:
        try:
            checked(self)
        except RequestError as error:  # a setting is the operator's, not a request's
            raise EngineError(str(error)) from None
        if self.speculate is None:
            object.__setattr__(self, "speculate", "none" if self.draft_model is None else "draft")
        if (self.speculate == "draft") != (self.draft_model is not None):
            raise EngineError(
                f"speculate={self.speculate!r} with draft_model={self.draft_model!r}: a draft model's folder goes with "
                f"speculate='draft', and with nothing else"
            )
        for name in ("max_num_batched_tokens", "unhurried_tokens"):
            tokens = getattr(self, name)
            if tokens is not None and tokens < self.max_num_seqs:
                raise EngineError(
                    f"{name}={tokens} is less than max_num_seqs={self.max_num_seqs}: a step must hold one token of "
                    f"every sequence; raise the first or lower the second"
                )
