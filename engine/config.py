"""The settings of one engine: declared once, checked when made, fixed for its life."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from engine.declared import Flag, Integer, Number, OneOf, Text, checked, declare
from engine.errors import EngineError, ErrorText, FieldName, RequestError

DType = Literal["auto", "float32", "bfloat16", "float16"]
Device = Literal["auto", "cpu", "cuda"]
KernelSet = Literal["auto", "reference", "ragged", "sdpa", "cpu", "native", "triton"]
Quantization = Literal["none", "fp8"]
KvCacheDType = Literal["auto", "int8", "fp8"]
Speculate = Literal["none", "lookup", "draft"]

#: The most draft tokens that one sequence may have in one step.
MAX_SPECULATE_TOKENS = 16
#: The most processes that compute a model together.
MOST_RANKS = 16
_MAX_STEP_TOKENS = 1 << 20


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Settings of one engine. Raises EngineError naming the setting, the value and what is allowed.

    If a default is None, the engine picks a value that suits the device, the model or the free memory. A setting with
    an `Option` is one of `penstock worker`, `up`, `run` and others; its text is the one of `--help`.
    """

    max_num_seqs: int | None = declare(
        None, Integer(1, 4096), "Most sequences in one batch. Unset: 64, on a GPU 256.", serving=True
    )
    """A request with n choices makes n sequences. None is fewer where the other limits of a step are lower."""
    max_num_batched_tokens: int | None = declare(
        None,
        Integer(1, _MAX_STEP_TOKENS),
        "Most tokens computed in one engine step.",
        serving=True,
    )
    """At least max_num_seqs, so that every decode can go on."""
    max_non_priority_step_tokens: int | None = declare(
        None,
        Integer(1, _MAX_STEP_TOKENS),
        "Most tokens in a step that computes no prompt of the priority tier. A small number lets priority requests "
        "start sooner. Unset: --max-num-batched-tokens.",
        serving=True,
    )
    """At least max_num_seqs. A lower value shortens the steps that a priority request may have to wait for. The
    priority request's own prompt may still fill max_num_batched_tokens."""
    kv_cache_bytes: int | None = declare(None, Integer(1, 1 << 50), "Memory for the KV cache, in bytes.", serving=True)
    """None takes a bounded part of the free memory."""
    memory_share: float = declare(
        0.85,
        Number(0, 1, above=True),
        "Share of the GPU's memory to use, unless --kv-cache-bytes is given. Unset: 0.85.",
        serving=True,
    )
    """The part of a GPU's memory that weights, steps and KV cache may take together. The engine measures a step's
    memory by running the largest steps. The remaining part is a reserve."""
    share: float = declare(1.0, Number(0, 1, above=True))
    """The engine's share of the device, which several engines share: of the memory that `memory_share` allows, or that
    a CPU's KV cache may take, and of its steps while others have some, too."""
    turns: str | None = declare(None, Text())
    """The folder in which engines that share a device take turns, a step at a time (engine.execution.turns). None: this
    one computes whenever it has work."""
    dtype: DType = declare(
        "auto",
        OneOf(get_args(DType)),
        "Data type of weights and activations: auto, float32, bfloat16 or float16.",
    )
    quantization: Quantization = declare(
        "none",
        OneOf(get_args(Quantization)),
        "none, or fp8: 8-bit weights and activations, on GPUs from compute capability 8.9.",
    )
    """Quantises, on loading, the weights of all matrix products but the last. "fp8" stores 8-bit floats with one scale
    per output channel, and scales activations per token."""
    kv_cache_dtype: KvCacheDType = declare(
        "auto",
        OneOf(get_args(KvCacheDType)),
        "auto, or int8 or fp8: 8-bit keys and values, which leave memory for more context.",
    )
    """The data type of the KV cache. "auto" is the type that the kernels compute with. "int8", with one scale for each
    key and value of a head, and "fp8" (e4m3) take a half or a quarter of the memory. Both need kernels="native" or
    "triton". On a GPU they exclude deterministic mode, and "fp8" needs compute capability 8.9 or more."""
    deterministic: bool = declare(
        False,
        Flag(),
        "Make outputs identical to the bit whatever runs beside a task, however its prompt is cut, and after "
        "interruptions. Native CPU kernels always do, at no cost.",
    )
    """Whether a sequence's output depends on nothing but the sequence itself, to the bit. It is then independent of the
    rest of the batch, of prefill chunks, prefix-cache hits, preemption and overlap. Engines of equal fingerprint then
    give identical output."""
    speculate: Speculate | None = declare(
        None,
        OneOf(get_args(Speculate)),
        "Speculative decoding: none, lookup (guess what followed the same words before) or draft (guess with a "
        "smaller model). The output stays the same. Unset: draft with --draft-model, else none.",
    )
    """The source of draft tokens, several of which the model then checks in one step. "lookup" takes the tokens that
    followed the same words earlier in the sequence; "draft" runs `draft_model`. The output is the same (to the bit in
    deterministic mode). None becomes "draft" with a draft model, else "none"."""
    draft_model: str | None = declare(
        None, Text(), "A smaller model that guesses tokens, named like MODEL; it must have the same vocabulary."
    )
    """The folder of a smaller model with the same vocabulary, for speculate="draft"."""
    speculate_tokens: int = declare(
        5,
        Integer(1, MAX_SPECULATE_TOKENS),
        f"Most tokens guessed at a time, 1 to {MAX_SPECULATE_TOKENS}. Unset: 5.",
    )
    """The most draft tokens for one sequence in one step."""
    speculate_adaptive: bool = declare(True, Flag())
    """Whether the number of draft tokens adapts, down to none, to the acceptance rate and to the measured times of
    steps of each size. If false, the engine always drafts as many tokens as it may."""
    device: Device = declare("auto", OneOf(get_args(Device)), "Where the model runs: auto, cpu or cuda.")
    threads: int | None = declare(
        None, Integer(1, 4096), "CPU threads. Unset: the cores that the machine or container has."
    )
    """The number of CPU threads. None means one for each core, within a container's limit of processor time. After each
    call the threads poll for work for a tenth of a millisecond and then sleep. If another process keeps a core busy,
    one thread less may be faster."""
    tensor_parallel: int = declare(
        1,
        Integer(1, MOST_RANKS),
        "Processes that compute the model together, each with its share of the weights and of the machine's "
        "cores. It must divide the model's heads. Unset: 1.",
    )
    """The number of ranks. Each holds 1 / tensor_parallel of every matrix and of the KV cache: on CPUs with native
    kernels, or each on a GPU of its own. `threads` is for all together. The number is a part of the engine's
    fingerprint: sums over another number of ranks round differently."""
    pipeline_parallel: int = declare(
        1,
        Integer(1, MOST_RANKS),
        "Stages, each with its part of the layers in processes of its own (--tensor-parallel of them), through which "
        "steps of different requests pass at the same time. Unset: 1.",
    )
    """The number of stages. Each rank of a stage holds `1 / tensor_parallel` of every matrix of the stage's layers, and
    their KV cache. It changes no output."""
    nodes: int = declare(
        1,
        Integer(1, MOST_RANKS),
        "Machines that compute the model together, each with its part of the stages (--pipeline-parallel), or of the "
        "ranks of a single stage (--tensor-parallel): this one, and others that run `penstock ranks`. Unset: 1.",
    )
    ranks_address: str = declare(
        "0.0.0.0:29500",
        Text(256),
        "Address at which this machine waits for the others (--nodes). Unset: 0.0.0.0:29500.",
        metavar="HOST:PORT",
    )
    ranks_secret: str | None = declare(
        None, Text(), "File with a secret of 16 bytes or more, the same on all machines (--nodes).", metavar="FILE"
    )
    adapter_bytes: int = declare(
        1 << 30,
        Integer(0, 1 << 50),
        "Most bytes of memory that loaded adapters take together. Unset: 1 GiB.",
        serving=True,
    )
    """The most bytes that loaded LoRA adapters take together, at their data type in memory."""
    watermark_keys: str | None = declare(
        None,
        Text(),
        "File with keys of watermarks, which requests name: `penstock watermark key` makes them.",
        metavar="FILE",
    )
    """A TOML file: see `engine.watermark.read_watermarks`. Not with the kernel sets "triton" and "ragged"."""
    watermark_default: str | None = declare(
        None, Text(64), "Mark the outputs of requests that name no watermark by this key.", metavar="NAME"
    )
    watermark_optional: bool = declare(False, Flag(), "Let requests turn --watermark-default off.")
    kernels: KernelSet = declare("auto", OneOf(get_args(KernelSet)))
    """The kernel set that computes the model. "auto" picks "triton" on CUDA, or "sdpa" if triton is not installed. On a
    CPU it picks "native" (Penstock's own C++), or "cpu" (oneDNN, torch) if that was not built at install. Tests use
    "reference" (plain torch) and "ragged" (the same under the runner for CUDA)."""
    graphs: bool = declare(True, Flag())
    """Whether pure decode steps are recorded as CUDA graphs, before they are needed, and replayed. Without graphs the
    host launches each kernel, which takes longer than the kernels themselves at small batch sizes."""
    block_size: int = declare(16, Integer(1, 1024))
    """The number of tokens in one KV block."""
    max_model_len: int | None = declare(None, Integer(2, 1 << 31))
    """The most tokens of prompt and output together. None means the model's own context length."""
    enable_prefix_caching: bool = declare(True, Flag())
    batch_window_ms: float = declare(
        0.0,
        Number(0, 50),
        "Longest time, in ms, for which a step of embeddings, scores or labels waits for more texts while others came "
        "during the step before it; a text that finds the engine idle never waits. Unset: 0.",
        name="--batch-window",
        serving=True,
    )
    """For models that generate nothing; others take no notice of it. The wait counts from a text's arrival, and ends
    early once the step is full."""
    ageing_s: float = declare(30.0, Number(0.001, 1e9))
    """A waiting request rises by one tier for each `ageing_s` seconds. At the most, requests never age in practice."""
    overlap: int | None = declare(None, Integer(0, 1))
    """The number of steps, 0 or 1, that are planned and launched before the results of the running step are known. None
    means 1 on CUDA, where it keeps the device busy, and with several stages, for the same reason; and 0 on a CPU, which
    plans and computes with the same cores. With M stages 1 stands for M - 1. The output is the same. A sequence whose
    end could not be foreseen is computed for one step more."""
    seed: int | None = declare(None, Integer(0, (1 << 63) - 1))
    """The source of seeds for requests that have none. None gives different seeds at every start."""

    def __post_init__(self) -> None:
        try:
            checked(self)
        except RequestError as error:  # a setting is the operator's, not a request's
            raise EngineError(error.message) from None
        spanned, uneven = divmod(self.nodes, self.pipeline_parallel)  # machines of each stage
        if self.pipeline_parallel % self.nodes and (uneven or self.tensor_parallel % spanned):
            raise EngineError(
                ErrorText.of(
                    "{pipeline_parallel}={} with {tensor_parallel}={} cannot be divided among {nodes}={} machines: "
                    "each has as many whole stages, or as many ranks of one stage",
                    *(self.pipeline_parallel, self.tensor_parallel, self.nodes),
                )
            )
        if self.nodes > 1 and self.ranks_secret is None:
            raise EngineError(
                ErrorText.of("{nodes}={} needs {ranks_secret}: a file that is the same on all machines", self.nodes)
            )
        if self.tensor_parallel * self.pipeline_parallel > MOST_RANKS:
            raise EngineError(
                ErrorText.of(
                    "{tensor_parallel}={} by {pipeline_parallel}={} is more than the {} processes that may compute a "
                    "model together",
                    *(self.tensor_parallel, self.pipeline_parallel, MOST_RANKS),
                )
            )
        if self.speculate is None:
            object.__setattr__(self, "speculate", "none" if self.draft_model is None else "draft")
        if (self.speculate == "draft") != (self.draft_model is not None):
            raise EngineError(
                ErrorText.of(
                    "{speculate}='draft' needs {draft_model}: the model that guesses, such as tiny-draft for tiny-v2"
                )
                if self.draft_model is None
                else ErrorText.of(
                    "{speculate}={} with {draft_model}={}: a draft model goes with {speculate}='draft' alone",
                    repr(self.speculate),
                    repr(self.draft_model),
                )
            )
        if self.watermark_default is not None and self.watermark_keys is None:
            raise EngineError(ErrorText.of("{watermark_default} needs {watermark_keys}: the file that has the key"))
        if self.watermark_optional and self.watermark_default is None:
            raise EngineError(ErrorText.of("{watermark_optional} needs {watermark_default}: there is nothing else off"))
        for name in ("max_num_batched_tokens", "max_non_priority_step_tokens"):
            tokens = getattr(self, name)
            if tokens is not None and self.max_num_seqs is not None and tokens < self.max_num_seqs:
                raise EngineError(
                    ErrorText.of(
                        "{}={} is less than {max_num_seqs}={}: a step must hold one token of every sequence; raise the "
                        "first or lower the second",
                        FieldName(name),
                        tokens,
                        self.max_num_seqs,
                    )
                )

    @property
    def ranks(self) -> int:
        """The processes that compute the model together."""
        return self.tensor_parallel * self.pipeline_parallel

    @property
    def own_ranks(self) -> int:
        """Those of this machine."""
        return self.ranks // self.nodes
