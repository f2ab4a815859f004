"""The engine's public interface: load, generate or submit, abort, stats, close."""

from __future__ import annotations

import hashlib
import itertools
import logging
import sys
import threading
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, Protocol

import torch

from engine.adapters import Adapter, load_adapter
from engine.config import EngineConfig
from engine.errors import DeviceLostError, EngineError, ErrorText, RequestError, brief
from engine.execution.loop import StepLoop
from engine.execution.placement import REHEARSED, plan_capacity, runner_for, speculation_for, while_idle
from engine.execution.ranks.group import Group
from engine.execution.ranks.runner import LeadModel, types_of
from engine.execution.threads import on_nodes_of, threads_for
from engine.execution.turns import Turns
from engine.grammar.source import parser_version
from engine.kernels import Kernels
from engine.kernels.native.exchange import WHOLE
from engine.kv import Capacity
from engine.memory import release
from engine.models import Model, load_model
from engine.models.registry import check_ranks_of
from engine.params import SamplingParams
from engine.request import Choice, Event, Output, Request, TokenLogprobs
from engine.scheduling.adapters import AdapterTable
from engine.scheduling.limits import ModelTraits
from engine.scheduling.policy import Policy
from engine.scheduling.scheduler import Scheduler, SchedulerStats
from engine.text import ModelCard, Tokenizer
from engine.text.checkpoint import model_version
from engine.text.config import Config, read_config
from engine.text.files import has_tokenizer
from engine.text.gguf import absolute
from engine.watermark import Watermarks, read_watermarks

logger = logging.getLogger("penstock.engine")


@dataclass(frozen=True, slots=True)
class EngineStats(SchedulerStats):
    """The scheduler's statistics and the engine's own."""

    kv_tokens_total: int
    last_step_ms: float
    dtype: str
    """The data type of the weights."""
    compute_dtype: str
    """The data type in which weights are held and computed. It is wider than `dtype` on a CPU that only emulates
    that."""
    device: str
    kernels: str
    slow_rank: str = ""
    """The rank for which the others wait most of the time, in words; empty if none stands out."""
    rank_processes: tuple[int, ...] = ()
    """The ids of the processes of the model's other ranks on this machine."""


class Engine(StepLoop):
    """Generates tokens for requests: the step loop of a loaded model. Thread-safe; made by `Engine.load`. As a context
    manager it closes itself."""

    kind: Literal["generate"] = "generate"
    """What the model makes."""
    texts: None = None
    """See PoolingEngine."""

    def __init__(
        self,
        model: Model,
        config: EngineConfig,
        *,
        folder: Path,
        version: str,
        draft: Model | None = None,
        group: Group | None = None,
        watermarks: Watermarks | None = None,
    ) -> None:
        """`draft`: the loaded model of `config.draft_model`. `group`: the other ranks of a model that is this rank's
        share; the engine closes it. `watermarks`: of `config.watermark_keys`."""
        if watermarks is not None and model.kernels.ragged:
            raise EngineError(
                ErrorText.of(
                    "{watermark_keys}={}: the sampler of the kernels {} on {} has no watermark yet; serve this model "
                    "on a CPU, or without the keys",
                    *(repr(config.watermark_keys), model.kernels.name, model.device.type),
                )
            )
        #: The model's folder.
        self.folder = folder
        #: The watermark keys that requests may name. None: there are none.
        self.watermarks = watermarks
        self.card: ModelCard | None = None
        self.tokenizer: Tokenizer | None = None
        # A folder without a tokenizer still serves token ids.
        if has_tokenizer(folder):
            self.tokenizer = Tokenizer.from_folder(folder)
            self.card = ModelCard.from_folder(folder, tokenizer=self.tokenizer)
        if draft is not None:
            check_same_tokens(self.tokenizer, model, Path(str(config.draft_model)), draft)
        self._model = model
        self._group = group
        #: The bytes that loaded adapters may take together.
        self.adapter_bytes = config.adapter_bytes
        self._adapters: AdapterTable[Adapter] = AdapterTable()
        self._loading = threading.Lock()
        self._ids = itertools.count()
        self.fingerprint = fingerprint_of(model, config.block_size)
        _log_choices(folder.name, model, config)
        with nullcontext() if group is None else group.in_time("to make the KV caches of all ranks"):
            capacity = plan_capacity(model, config, draft)
            self._publish(capacity)
            runner = runner_for(model, config, capacity)
        speculation = speculation_for(model, draft, config, capacity, runner)
        scheduler = Scheduler(capacity, self._traits(folder, version), _policy(model, config), speculation)
        #: Tells the marks (`engine.prefix`) of what a request finds here: of loaded adapters, then of cached prefixes,
        #: the newest last. Any thread may call it.
        self.marks: Callable[[], list[str]] = scheduler.marks
        #: The tokens of a block, by which marks are made; 0: no prefix is cached.
        self.marked_block = config.block_size if config.enable_prefix_caching else 0
        super().__init__(
            scheduler,
            runner,
            partial(model.kernels.use_threads, config.threads),
            overlap=_overlap(model, config),
            release=release,
            check=partial(_check, model.device, group),
            on_idle=while_idle(runner),
            turns=None if config.turns is None else Turns(config.turns, config.share),
        )
        if group is not None:
            group.on_lost = self.look

    def _publish(self, capacity: Capacity) -> None:
        self.max_num_seqs = capacity.max_num_seqs
        self.max_model_len = capacity.max_model_len
        #: The tokens of one step, and of its prompts that are not of the best tier.
        self.step_tokens = capacity.step_tokens
        #: The tokens of whole sequences that the KV cache can hold at one time.
        self.kv_tokens_total = capacity.tokens_of_all
        #: The tokens of the longest sequence that the KV cache can hold.
        self.kv_capacity = capacity.tokens_of_one

    def _traits(self, folder: Path, version: str) -> ModelTraits:
        eos = () if self.tokenizer else _eos(Config.of_model(read_config(folder)))
        traits = ModelTraits(version, self._model.vocab_size, eos, self._model.rope_switch, adapters=self._adapters)
        traits = replace(traits, watermarks=self.watermarks)
        if self.tokenizer is None:
            return traits
        traits = traits.with_text(self.tokenizer)
        assert traits.grammars is not None
        traits.grammars.prepare()
        return traits

    @classmethod
    def load(
        cls,
        path: str | Path,
        config: EngineConfig | None = None,
        *,
        loaded: Callable[[str], None] = lambda phase: None,
        progress: Callable[[int, int], None] = lambda done, total: None,
    ) -> Engine:
        """Load the Hugging Face folder or GGUF file at `path`. Raises ModelError about these, EngineError about the
        rest.

        `loaded` is called with "weights" when these are read, and on a GPU with "compile" when it can compute.
        `progress` is called while they are read, with the bytes of its weights that were read so far, and of all.
        """
        config = config or EngineConfig()
        device = device_named(config.device)
        if device.type == "cpu":
            torch.set_num_threads(threads_for(config.threads, torch.get_num_threads()))
        folder = Path(path)
        if config.ranks == 1:
            return cls._load(folder, config, None, loaded, progress)
        check_ranks_of(folder, config.tensor_parallel, config.pipeline_parallel)
        group = Group(folder, config, max(1, torch.get_num_threads() // config.own_ranks), device)
        try:
            with on_nodes_of(0, config.own_ranks):
                return cls._load(folder, config, group, loaded, progress)
        except BaseException:
            group.close()
            raise

    @classmethod
    def _load(
        cls,
        folder: Path,
        config: EngineConfig,
        group: Group | None,
        loaded: Callable[[str], None],
        progress: Callable[[int, int], None],
    ) -> Engine:
        watermarks = None
        if config.watermark_keys is not None:  # before the weights: the file may be wrong
            keys, default = config.watermark_keys, config.watermark_default
            watermarks = read_watermarks(keys, default, optional=config.watermark_optional)
        threads = torch.get_num_threads()
        if group is not None:
            torch.set_num_threads(group.threads)
        share = load_model(
            folder,
            config.dtype,
            device_named(config.device),
            config.kernels,
            config.quantization,
            config.deterministic,
            config.kv_cache_dtype,
            progress,
            exchange=None if group is None else group.sums,
            stage=WHOLE if group is None else group.stage,
            processes=config.own_ranks,
        )
        model: Model = share
        if group is not None:
            # Another engine of this process counts by it. This engine's thread sets its own number later.
            torch.set_num_threads(threads)
            group.wait(types_of(share))
            model = group.model_of(share)
        draft = None
        if config.draft_model is not None:
            # The target model checks the draft model's tokens, so the draft model need not be as exact.
            draft = load_model(config.draft_model, config.dtype, model.device, config.kernels)
        loaded("weights")
        version = model_version(absolute(folder))
        engine = cls(model, config, folder=folder, version=version, draft=draft, group=group, watermarks=watermarks)
        if model.device.type in REHEARSED:
            loaded("compile")
        return engine

    def load_adapter(self, name: str, path: str | Path) -> Adapter:
        """Load the LoRA adapter in the folder `path`, as PEFT saves one, for requests whose `adapter` is `name`.

        Running steps go on meanwhile; calls wait for each other. Raises ModelError naming what is wrong with the
        folder, or if it does not fit the model; AdapterRoomError if there is no room for it in
        `EngineConfig.adapter_bytes`; EngineError if the name is empty or taken by another adapter.
        """
        if not name:
            raise EngineError("an adapter's name is empty")
        with self._loading:
            room = self.adapter_bytes - sum(adapter.nbytes for adapter in self.adapters.values())
            adapter = load_adapter(path, self._model, max_bytes=room)
            if self._group is not None and isinstance(self._model, LeadModel):
                self._model.number(adapter, number := next(self._ids))
                self._group.load_adapter(Path(path), adapter.version, number)
            self._adapters.add(name, adapter)
            return adapter

    def unload_adapter(self, name: str) -> bool:
        """Unload an adapter. Requests that use it go on to their ends; its memory is free after the last of them.
        Returns False if there is none of this name."""
        return self._adapters.remove(name)

    @property
    def adapters(self) -> dict[str, Adapter]:
        """The loaded adapters by name."""
        return self._adapters.items()

    def generate(
        self,
        prompts: Seq[str | list[int]],
        params: SamplingParams | Seq[SamplingParams] | None = None,
        adapter: str = "",
    ) -> list[Output]:
        """Generate outputs for all prompts (texts or lists of token ids) and wait. `params`: one for all, or one each.
        `adapter`: the name of a loaded adapter; "" for the model itself.

        The tokenizer adds its own special tokens to texts. Raises RequestError before anything runs. A request that
        fails later, or whose form cannot be followed, has finish_reason "error", and says why as `error`.
        """
        if isinstance(prompts, str):
            raise RequestError("prompts is one text; pass a list of texts or of token-id lists", param="prompts")
        if params is None or isinstance(params, SamplingParams):
            each = [params or SamplingParams()] * len(prompts)
        else:
            each = list(params)
        if strange := [entry for entry in each if type(entry) is not SamplingParams]:
            raise RequestError(f"params has {strange[0]!r}, which is no SamplingParams", param="params")
        if len(each) != len(prompts):
            raise RequestError(f"{len(prompts)} prompts and {len(each)} params; give one for all or one each")
        collectors = [
            _Collector(Request(f"generate-{next(self._ids)}", self._token_ids(prompt), request_params, adapter=adapter))
            for prompt, request_params in zip(prompts, each, strict=True)
        ]
        try:
            for collector in collectors:
                self.submit(collector.request, collector.take)
            for collector in collectors:
                collector.wait()
        except BaseException:
            for collector in collectors:
                self.abort(collector.request.id)
            raise
        return [collector.output() for collector in collectors]

    def _token_ids(self, prompt: Any) -> list[int]:
        if not isinstance(prompt, str):
            if isinstance(prompt, bytes) or not isinstance(prompt, Iterable):
                raise RequestError(f"prompts has {prompt!r}, which is neither text nor token ids", param="prompts")
            return list(prompt)
        if self.tokenizer is None:
            raise RequestError("the model has no tokenizer.json: prompts must be token ids", param="prompts")
        return self.tokenizer.encode(prompt)

    def stats(self) -> EngineStats:
        kernels = self._model.kernels
        return EngineStats(
            **asdict(super().stats()),
            kv_tokens_total=self.kv_tokens_total,
            last_step_ms=self.last_step_s * 1e3,
            dtype=_name(self._model.dtype),
            compute_dtype=_name(kernels.compute_dtype),
            device=str(self._model.device),
            kernels=kernels.name,
            slow_rank="" if self._group is None else self._group.slow_rank,
            rank_processes=() if self._group is None else self._group.processes,
        )

    def close(self) -> None:
        """See StepLoop. Also ends the other ranks."""
        super().close()
        if self._group is not None:
            self._group.close()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class _Collector:
    """Gathers one request's events into an Output."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self._finished = threading.Event()
        self._choices = [Choice() for _ in range(request.params.n)]
        self._pieces: list[list[str]] = [[] for _ in self._choices]
        self._prompt_tokens = len(request.prompt_ids)
        self._cached_tokens = 0
        self._prompt_logprobs: list[TokenLogprobs | None] | None = None
        self._error: str | None = None

    def take(self, event: Event) -> None:
        if event.prompt_logprobs is not None:
            self._prompt_logprobs = event.prompt_logprobs
        choice = self._choices[event.choice]
        choice.token_ids += event.token_ids
        self._pieces[event.choice] += event.texts
        if event.logprobs is not None:
            choice.logprobs = (choice.logprobs or []) + event.logprobs
        choice.finish_reason = event.finish_reason
        self._cached_tokens = event.cached_tokens
        self._error = self._error or event.error
        if event.done:
            self._finished.set()

    def wait(self) -> None:
        self._finished.wait()

    def output(self) -> Output:
        for choice, pieces in zip(self._choices, self._pieces, strict=True):
            choice.text = "".join(pieces)
        first = self._choices[0]
        return Output(
            token_ids=first.token_ids,
            text=first.text,
            finish_reason=first.finish_reason,
            logprobs=first.logprobs,
            prompt_tokens=self._prompt_tokens,
            cached_tokens=self._cached_tokens,
            choices=self._choices,
            prompt_logprobs=self._prompt_logprobs,
            error=self._error,
        )


def device_named(requested: str) -> torch.device:
    """The torch device for a value of EngineConfig.device. Raises EngineError if there is no such device."""
    if requested == "cuda" and not torch.cuda.is_available():
        raise EngineError(ErrorText.of("{device}='cuda', but torch finds no CUDA device; use 'cpu' or 'auto'"))
    return torch.device("cuda" if requested != "cpu" and torch.cuda.is_available() else "cpu")


def check_same_tokens(tokenizer: Tokenizer | None, model: Model, folder: Path, draft: Model) -> None:
    """Raise EngineError if the draft model in `folder` has other tokens than the model: its token ids would then stand
    for other text."""
    theirs = Tokenizer.from_folder(folder) if has_tokenizer(folder) else None
    if draft.vocab_size != model.vocab_size:
        raise EngineError(
            ErrorText.of(
                "{draft_model}={} has a vocabulary of {} tokens, and the model one of {}; a draft model must have the "
                "model's own",
                repr(str(folder)),
                draft.vocab_size,
                model.vocab_size,
            )
        )
    if tokenizer is not None and theirs is not None and not tokenizer.same_tokens(theirs):
        raise EngineError(
            ErrorText.of(
                "{draft_model}={} has another tokenizer: the same token ids stand for other tokens; a draft model "
                "must have the model's own",
                repr(str(folder)),
            )
        )


def _policy(model: Model, config: EngineConfig) -> Policy:
    # A CPU takes as long for a decode's token as for a prompt's. On a GPU, decodes beside a prompt cost little.
    exclusive = model.device.type == "cpu"
    # Of several stages each has a part of the sequences, while those of the first are planned.
    batches = config.pipeline_parallel if config.overlap != 0 else 1
    return Policy(config.ageing_s, config.enable_prefix_caching, config.seed, exclusive, batches)


def _overlap(model: Model, config: EngineConfig) -> int:
    """The steps that are planned ahead of the oldest one that runs."""
    if config.overlap == 0:
        return 0
    if model.staged:
        return config.pipeline_parallel - 1
    return int(model.device.type == "cuda") if config.overlap is None else config.overlap


def _log_choices(name: str, model: Model, config: EngineConfig) -> None:
    logger.info(
        "%s computes on %s with kernels %r, weights in %s, %d threads%s",
        name,
        model.device.type,
        model.kernels.name,
        _name(model.kernels.weight_dtype),
        config.threads or torch.get_num_threads(),
        "" if config.ranks == 1 else f" of {config.ranks} processes",
    )


def _eos(config: Config) -> list[int]:
    value = config.get("eos_token_id")
    ids = value if isinstance(value, list) else [value]
    return [token_id for token_id in ids if isinstance(token_id, int)]


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


class Computes(Protocol):
    """The parts of a model that its fingerprint names."""

    kernels: Kernels
    device: torch.device
    dtype: torch.dtype


def fingerprint_of(model: Computes, block_size: int) -> str:
    """8 hex digits that differ between engines on which the same model and seed may give other tokens.

    `block_size`: the tokens of a KV block, by which kernels choose the layout of the cache and the order of sums.
    """
    if model.device.type == "cuda":
        capability = ".".join(map(str, torch.cuda.get_device_capability(model.device)))
    else:
        capability = torch.backends.cpu.get_cpu_capability()
    kernels = model.kernels
    traits = (
        _name(model.dtype),
        _name(kernels.compute_dtype),
        model.device.type,
        kernels.identity,
        str(block_size),
        torch.__version__,
        capability,
        parser_version(),
        *(() if kernels.exchange is None else (f"{kernels.exchange.share.ranks} ranks",)),
        *(() if kernels.collectives is None else (kernels.collectives.identity,)),
    )
    return hashlib.sha256("|".join(traits).encode()).hexdigest()[:8]


def _check(device: torch.device, group: Group | None) -> None:
    if group is not None:
        group.check(sys.exception())  # with which a step has failed here, if one has
    check_alive(device)


def check_alive(device: torch.device) -> None:
    """Wait for all queued work. Raises DeviceLostError if the device will run nothing more for this process.

    An illegal memory access by a kernel, or a fault of the GPU, ends CUDA for the whole process.
    """
    if device.type != "cuda":
        return
    try:
        torch.cuda.synchronize(device)
    except RuntimeError:
        # A transient error is reported only once.
        try:
            torch.cuda.synchronize(device)
        except RuntimeError as error:
            raise DeviceLostError(
                f"{device} does nothing more for this process, which has to be started anew: {brief(error)}"
            ) from error
