"""The public interface to models that generate nothing: load, embed, classify, score or submit, abort, stats, close."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from engine.adapters import Adapter
from engine.config import EngineConfig
from engine.declared import shown
from engine.engine import EngineStats, check_alive, device_named, fingerprint_of
from engine.errors import EngineError, ErrorText, ModelError, TextError
from engine.execution.loop import StepLoop
from engine.execution.placement import SEQUENCES
from engine.execution.threads import threads_for
from engine.execution.turns import Turns
from engine.kernels.unmasked import ACTIVATIONS
from engine.labels import Aggregation, Entity
from engine.memory import keep_freed, release
from engine.models import load_encoder, load_model
from engine.models.encoder import Encoder
from engine.models.encoders import ENCODERS
from engine.plan import Sampled
from engine.pooling.entities import labelled
from engine.pooling.runner import AskedText, DecoderRows, Pooler, PoolingRunner, numbers
from engine.pooling.scheduler import PoolingScheduler, TextLimits
from engine.request import Event, Pooling, PoolingKind, Request, TextRow
from engine.text import ModelCard, Tokenizer
from engine.text.checkpoint import model_version
from engine.text.config import Config, architectures, read_config
from engine.text.files import has_tokenizer
from engine.text.pooled import PooledTexts, Text
from engine.text.pooling import label_names, purpose, read_pooling, score_activation, several_labels
from engine.text.tokenizer import EncodedText

#: The default of max_num_batched_tokens: enough that products are compute-bound. A text may wait for one such step.
_STEP_TOKENS: Final = {"cpu": 2048, "cuda": 16384}
#: The same for an engine that shares its CPU: a decoder's steps wait for half as many batches, twice as long.
_STEP_TOKENS_SHARED: Final = {"cpu": 4096, "cuda": 16384}
#: The steps whose tokens are in hand at one time, so that the next is full when one ends.
_STEPS_IN_HAND: Final = 4
#: The rows whose logits are in memory at one time; each has as many as the vocabulary.
_ROWS_OF_LOGITS: Final = 16
#: Settings that say how tokens are generated.
_GENERATING: Final = {"speculate": "none", "draft_model": None, "quantization": "none", "kv_cache_dtype": "auto"}


class PoolingEngine(StepLoop):
    """Makes vectors, probabilities of labels, or scores of texts. Thread-safe; made by `PoolingEngine.load`. As a
    context manager it closes itself."""

    watermarks: None = None
    """It has none: it generates no tokens."""
    adapter_bytes = 0
    """It has no adapters."""
    marked_block = 0
    """It caches no prefixes."""

    def marks(self) -> list[str]:
        """See Engine; it has none."""
        return []

    def __init__(self, model: Encoder | DecoderRows, config: EngineConfig, *, folder: Path, version: str) -> None:
        for name, usual in _GENERATING.items():
            if getattr(config, name) != usual:
                raise EngineError(
                    f"{name}={shown(getattr(config, name))}: the model in {folder} generates no tokens; use {usual!r}"
                )
        values = read_config(folder)
        #: The kind of result that the model makes.
        self.kind: PoolingKind = _kind(folder, values, model)
        #: The model's folder.
        self.folder = folder
        self.tokenizer = Tokenizer.from_folder(folder) if has_tokenizer(folder) else None
        self.card = None if self.tokenizer is None else ModelCard.from_folder(folder, tokenizer=self.tokenizer)
        self.pooling = read_pooling(folder)
        #: The labels, in the order of their probabilities; () unless it classifies.
        self.labels = label_names(Config(values)) if self.kind in ("classify", "token_classify") else ()
        self._model = model
        self._ids = itertools.count()
        self.fingerprint = fingerprint_of(model, 0)
        device = model.device.type
        if device == "cpu":
            keep_freed()
        length = min(model.context_length, self.pooling.max_length or model.context_length)
        #: The most tokens of a text.
        self.max_model_len = self.kv_capacity = min(length, config.max_model_len or length)
        #: How texts become tokens.
        self.texts = PooledTexts(
            folder,
            self.tokenizer,
            self.pooling,
            self.max_model_len,
            model.vocab_size,
            spans=self.kind == "token_classify",
        )
        defaults = _STEP_TOKENS if config.turns is None else _STEP_TOKENS_SHARED
        step_tokens = config.max_num_batched_tokens or defaults[device]
        self.step_tokens = min(step_tokens, config.max_non_priority_step_tokens or step_tokens)
        #: The most texts of a step.
        self.max_num_seqs = config.max_num_seqs or SEQUENCES[device]
        #: The tokens in hand at one time. There is no KV cache: more would wait in this process.
        self.kv_tokens_total = max(_STEPS_IN_HAND * step_tokens, self.max_model_len)
        finish, self.dimensions = self._finisher(folder, model)
        scheduler = PoolingScheduler(
            TextLimits(frozenset({self.kind}), self.max_model_len, model.vocab_size, self.dimensions),
            step_tokens=self.step_tokens,
            max_num_seqs=self.max_num_seqs,
            ageing_s=config.ageing_s,
            window_s=config.batch_window_ms / 1e3,
        )
        super().__init__(
            scheduler,
            PoolingRunner(model, finish),
            partial(model.kernels.use_threads, config.threads),
            release=release,
            check=lambda: check_alive(model.device),
            batching_wait=scheduler.batching_wait,
            turns=None if config.turns is None else Turns(config.turns, config.share, batches=True),
        )

    @classmethod
    def load(
        cls,
        path: str | Path,
        config: EngineConfig | None = None,
        *,
        loaded: Callable[[str], None] = lambda phase: None,
        progress: Callable[[int, int], None] = lambda done, total: None,
    ) -> PoolingEngine:
        """Load the Hugging Face or Sentence-Transformers folder at `path`. Raises as `Engine.load`, whose `loaded` and
        `progress` these are."""
        config = config or EngineConfig()
        if config.ranks > 1:
            raise EngineError(
                ErrorText.of(
                    "{tensor_parallel}={} and {pipeline_parallel}={} are for models that generate text",
                    *(config.tensor_parallel, config.pipeline_parallel),
                )
            )
        device = device_named(config.device)
        if device.type == "cpu":
            torch.set_num_threads(threads_for(config.threads, torch.get_num_threads()))
        folder = Path(path)
        arguments = folder, config.dtype, device, config.kernels
        model: Encoder | DecoderRows
        if any(name in ENCODERS for name in architectures(read_config(folder))):
            model = load_encoder(*arguments, config.deterministic, progress)
        else:
            decoder = load_model(*arguments, deterministic=config.deterministic, progress=progress, headless=True)
            model = DecoderRows(decoder)
        loaded("weights")
        return cls(model, config, folder=folder, version=model_version(folder.resolve()))

    def _token_ids(self, folder: Path, *tokens: int | str | None) -> list[int]:
        """The ids of those tokens that are given. Raises ModelError."""
        ids = []
        for token in (token for token in tokens if token is not None):
            token_id = self.tokenizer.token_id(token) if isinstance(token, str) and self.tokenizer else token
            if not isinstance(token_id, int):
                raise ModelError(f"{folder}: pairs are scored by the token {token!r}, which tokenizer.json lacks")
            ids.append(token_id)
        return ids

    def _finisher(
        self, folder: Path, model: Encoder | DecoderRows
    ) -> tuple[Callable[[Tensor, Sequence[int], Sequence[AskedText]], list[Sampled]], int]:
        """The function that makes the results of a step's rows, and how many numbers each has."""
        if self.kind == "embed":
            pooler = Pooler(folder, self.pooling, model.width, model.device)

            def embed(hidden: Tensor, lengths: Sequence[int], texts: Sequence[AskedText]) -> list[Sampled]:
                return [
                    numbers(
                        pooler(rows, request.prompt_tokens[number] if request.prompt_tokens else 0, request.dimensions)
                    )
                    for rows, (request, number) in zip(torch.split(hidden, list(lengths)), texts, strict=True)
                ]

            return embed, pooler.dimensions
        activation = self._probabilities(folder)
        if isinstance(model, DecoderRows):
            assert self.pooling.score is not None
            tokens = self._token_ids(folder, self.pooling.score.true_token, self.pooling.score.false_token)
            return partial(_scores, model, tokens, activation), 1
        assert model.head is not None
        several = several_labels(Config(read_config(folder)))

        def classify(hidden: Tensor, lengths: Sequence[int], texts: Sequence[AskedText]) -> list[Sampled]:
            return [numbers(activation(logits.double())) for logits in model.classify(hidden, lengths)]

        def label(hidden: Tensor, lengths: Sequence[int], texts: Sequence[AskedText]) -> list[Sampled]:
            parts = torch.split(model.classify(hidden, lengths), list(lengths))
            return [
                labelled(activation(logits.double()).cpu().numpy(), self.labels, several, *text)
                for logits, text in zip(parts, texts, strict=True)
            ]

        return label if model.head.tokens else classify, model.head.labels

    def _probabilities(self, folder: Path) -> Callable[[Tensor], Tensor]:
        """The function that makes probabilities, or a score, of a text's logits."""
        values = read_config(folder)
        if self.kind != "rerank":
            several = several_labels(Config(values))
            return torch.sigmoid if several else partial(torch.softmax, dim=-1)
        name = score_activation(folder, values)
        return torch.sigmoid if name == "sigmoid" else ACTIVATIONS[name]

    # ---- a caller's texts

    def embed(
        self,
        texts: Sequence[Text],
        *,
        prompt: str | None = None,
        dimensions: int | None = None,
        truncate: bool = False,
    ) -> np.ndarray:
        """The vectors of texts, fp32 [texts, dimensions]. `prompt`: the name of one of the model's prompts; None for
        its default. `dimensions`: cut vectors to these. `truncate`: cut texts that are too long.

        Raises RequestError before anything runs, EngineError if it fails later.
        """
        before = self.texts.text_before(prompt)
        prompt_tokens = self.texts.prompt_tokens(before)
        tokens = tuple(prompt_tokens if isinstance(text, str) else 0 for text in texts)  # ids are taken as they are
        encoded = [self.texts.encoded(before + text if isinstance(text, str) else text, truncate) for text in texts]
        rows = self._vectors("embed", encoded, prompt_tokens=tokens, dimensions=dimensions)
        return np.array(rows, dtype=np.float32).reshape(len(texts), dimensions or self.dimensions)

    def classify(self, texts: Sequence[Text], *, truncate: bool = False) -> list[dict[str, float]]:
        """For each text, the probability of each label. Raises as `embed`."""
        rows = self._vectors("classify", [self.texts.encoded(text, truncate) for text in texts])
        return [dict(zip(self.labels, row, strict=True)) for row in rows]

    def classify_tokens(
        self,
        texts: Sequence[str],
        *,
        aggregation: Aggregation = "simple",
        threshold: float | None = None,
        truncate: bool = False,
    ) -> list[list[Entity]]:
        """For each text, its labelled parts in order. `threshold`: their least score; None for all, or for 0.5 where a
        token may have several labels. Raises as `embed`."""
        encoded = [self.texts.encoded(text, truncate) for text in texts]
        rows = self._wait("token_classify", encoded, aggregation=aggregation, threshold=threshold)
        return [[*row] for row in rows if isinstance(row, tuple)]

    def score(self, pairs: Sequence[tuple[str, str]], *, truncate: bool = False) -> list[float]:
        """The score of each pair, a query and a document. Raises as `embed`."""
        rows = self._vectors("rerank", [self.texts.encoded(query, truncate, document) for query, document in pairs])
        return [row[0] for row in rows]

    def _vectors(self, kind: PoolingKind, texts: Sequence[EncodedText], **pooling: Any) -> list[list[float]]:
        return [row for row in self._wait(kind, texts, **pooling) if isinstance(row, list)]

    def _wait(self, kind: PoolingKind, texts: Sequence[EncodedText], **more: Any) -> list[TextRow]:
        """The results of texts. `more`: fields of Pooling."""
        if not texts:
            return []
        seconds = tuple(text.second for text in texts if text.second is not None)
        spans = tuple(text.spans for text in texts) if self.kind == "token_classify" else ()
        pooling = Pooling(kind, tuple(len(text.ids) for text in texts), seconds, spans=spans, **more)
        ids = [token for text in texts for token in text.ids]
        request = Request(f"{kind}-{next(self._ids)}", ids, pooling=pooling)
        ended, events = threading.Event(), list[Event]()

        def take(event: Event) -> None:
            events.append(event)
            ended.set()

        self.submit(request, take)
        try:
            ended.wait()
        except BaseException:
            self.abort(request.id)
            raise
        event = events[0]
        if event.rows is None:
            raise EngineError(event.error or "the engine was closed")
        return [row for row in event.rows if not isinstance(row, TextError)]  # all: none was given as an error

    @property
    def adapters(self) -> dict[str, Adapter]:
        """It has none."""
        return {}

    def load_adapter(self, name: str, path: str | Path) -> Adapter:
        """Raises ModelError: adapters change the decoders of models that generate text."""
        raise ModelError(f"the adapter {name!r} cannot be loaded: the model in {self.folder} generates no text")

    def unload_adapter(self, name: str) -> bool:
        """Returns False: there is none of this name."""
        return False

    def close(self) -> None:
        super().close()
        self.texts.close()

    # ---- its state

    def stats(self) -> EngineStats:
        kernels = self._model.kernels
        return EngineStats(
            **asdict(super().stats()),
            kv_tokens_total=self.kv_tokens_total,
            last_step_ms=self.last_step_s * 1e3,
            dtype=str(self._model.dtype).removeprefix("torch."),
            compute_dtype=str(kernels.compute_dtype).removeprefix("torch."),
            device=str(self._model.device),
            kernels=kernels.name,
        )

    def __enter__(self) -> PoolingEngine:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _scores(
    model: DecoderRows,
    tokens: Sequence[int],
    activation: Callable[[Tensor], Tensor],
    hidden: Tensor,
    lengths: Sequence[int],
    texts: Sequence[AskedText],
) -> list[Sampled]:
    """The scores of pairs, of the logits after their last tokens: of the first token, less that of a second one."""
    last = torch.tensor(lengths, device=hidden.device).cumsum(0) - 1
    scores: list[Sampled] = []
    for rows in torch.split(hidden[last], _ROWS_OF_LOGITS):
        logits = model.model.logits(rows).double()
        score = logits[:, tokens[0]] - (logits[:, tokens[1]] if len(tokens) > 1 else 0.0)
        scores += map(numbers, activation(score).unsqueeze(1))
    return scores


def _kind(folder: Path, values: dict[str, object], model: Encoder | DecoderRows) -> PoolingKind:
    kind = purpose(folder, values)
    if kind == "rerank" and isinstance(model, DecoderRows):
        return "rerank"
    if (kind == "embed") != (model.head is None):
        raise ModelError(f"{folder}: modules.json and the architecture in config.json do not go together")
    return "embed" if kind == "generate" else kind
