"""Executes plans of texts on one device: a step is one ragged batch, in order of length.

`Pooler` makes one row of each sequence's rows: pooling, dense layers, normalisation, as Sentence-Transformers does.
Each sequence is pooled by itself, so its vector does not depend on its batch.

`DecoderRows` is a decoder as a maker of rows, as embedders such as Qwen3-Embedding have one: each token sees those
before it.

Its attention reads keys and values from a paged cache. Texts are computed whole, so that cache is only a step's memory:
it is as large as the largest step so far, and nothing stays in it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Final, Protocol

import torch
import torch.nn.functional as F
from safetensors import safe_open
from torch import Tensor

from engine.errors import NOT_FINITE, ModelError
from engine.kernels import RaggedBatch
from engine.kernels.unmasked import ACTIVATIONS
from engine.models import Model
from engine.plan import Sampled, ScheduledSeq, StepPlan
from engine.request import Pooling
from engine.sequence import Sequence as Text
from engine.text.files import file_in
from engine.text.pooling import DenseSettings, PoolingSettings
from engine.text.tensors import SINGLE

#: The smallest length that a vector is divided by, as in torch and Sentence-Transformers.
_SHORTEST: Final = 1e-12

_MODES: Final[dict[str, Callable[[Tensor, Tensor], Tensor]]] = {
    "cls": lambda rows, places: rows[0],
    "max": lambda rows, places: rows.amax(0),
    "mean": lambda rows, places: rows.mean(0),
    "mean_sqrt_len_tokens": lambda rows, places: rows.sum(0) / len(rows) ** 0.5,
    "weightedmean": lambda rows, places: (rows * places[:, None]).sum(0) / places.sum(),
    "lasttoken": lambda rows, places: rows[-1],
}


class Pooler:
    """The modules of a folder after its encoder. Computes in fp32."""

    def __init__(self, folder: Path, settings: PoolingSettings, width: int, device: torch.device) -> None:
        """`width`: of the encoder's rows. Raises ModelError naming a module that does not fit."""
        self._settings = settings
        self._steps: list[Callable[[Tensor], Tensor]] = []
        dimensions = width * len(settings.modes)
        for step in settings.steps:
            if step is None:
                self._steps.append(normalised)
                continue
            if step.inputs != dimensions:
                raise ModelError(
                    f"{folder}: the module {step.folder} takes {step.inputs} dimensions, and comes after {dimensions}"
                )
            self._steps.append(_dense(folder, step, device))
            dimensions = step.outputs
        self.dimensions = dimensions
        self._normalises = None in settings.steps

    def __call__(self, rows: Tensor, prompt_tokens: int, dimensions: int | None) -> Tensor:
        """The vector, fp32 [dimensions], of a sequence's last hidden states, [tokens, width].

        `prompt_tokens`: the tokens at the beginning that are the model's prompt. `dimensions`: cut to these, and
        normalised again if the model normalises.
        """
        places = torch.arange(1, len(rows) + 1, dtype=torch.float32, device=rows.device)
        if not self._settings.include_prompt and prompt_tokens < len(rows):
            rows, places = rows[prompt_tokens:], places[prompt_tokens:]
        rows = rows.float()
        vector = torch.cat([_MODES[mode](rows, places) for mode in self._settings.modes])
        for step in self._steps:
            vector = step(vector)
        if dimensions is None or dimensions == len(vector):
            return vector
        return normalised(vector[:dimensions]) if self._normalises else vector[:dimensions]


def normalised(vector: Tensor) -> Tensor:
    """The vector at length 1; NaN, not 0, if its length overflows, as of a norm of `Reference.rms_norm`."""
    length: Tensor = torch.linalg.vector_norm(vector)
    return F.normalize(vector, dim=0, eps=_SHORTEST) + (length - length)


def _dense(folder: Path, settings: DenseSettings, device: torch.device) -> Callable[[Tensor], Tensor]:
    path = file_in(folder, f"{settings.folder}/{SINGLE}")
    if path is None:
        raise ModelError(f"{folder}: the module {settings.folder} has no {SINGLE}")
    shapes: dict[str, tuple[int, ...]] = {"linear.weight": (settings.outputs, settings.inputs)}
    if settings.bias:
        shapes["linear.bias"] = (settings.outputs,)
    weights = {}
    try:
        with ExitStack() as opened:
            file = opened.enter_context(safe_open(path, framework="pt"))
            for name, shape in shapes.items():
                weights[name] = file.get_tensor(name).float().to(device)
                if tuple(weights[name].shape) != shape:
                    raise ModelError(f"{path}: {name} has shape {list(weights[name].shape)}, not {list(shape)}")
    except ModelError:
        raise
    except Exception as error:  # safetensors raises its own, and others for what is missing
        raise ModelError(f"{path} cannot be read: {error}") from error
    activation = ACTIVATIONS[settings.activation]
    return lambda vector: activation(F.linear(vector, weights["linear.weight"], weights.get("linear.bias")))


#: The tokens of a block of the cache.
_BLOCK: Final = 16


class DecoderRows:
    """A loaded decoder with the interface of an Encoder without a head. Used by one thread."""

    head = None

    def __init__(self, model: Model) -> None:
        self.model = model
        self.kernels, self.device, self.dtype = model.kernels, model.device, model.dtype
        self.vocab_size, self.context_length = model.vocab_size, model.context_length
        self.width = model.embedding()[1].shape[1]
        self._caches: list[Tensor] = []
        self._blocks = 0

    def classify(self, hidden: Tensor, lengths: Sequence[int]) -> Tensor:
        """Never called: there is no head."""
        raise NotImplementedError

    def forward(self, tokens: Tensor, types: Tensor, lengths: Sequence[int]) -> Tensor:
        """See Encoder.forward. A decoder has no token types."""
        device, kernels = self.device, self.kernels
        sizes = torch.tensor(lengths)
        blocks = -(-sizes // _BLOCK)
        ends, last = sizes.cumsum(0), blocks.cumsum(0)
        self._reserve(int(last[-1]))
        positions = torch.arange(len(tokens)) - (ends - sizes).repeat_interleave(sizes)
        first = last - blocks
        # The block after the last one is always zero; tables are padded with it.
        columns = torch.arange(int(blocks.max()))
        tables = torch.where(columns < blocks[:, None], first[:, None] + columns, self._blocks).int()
        slots = (first * _BLOCK).repeat_interleave(sizes) + positions
        starts = torch.cat((torch.zeros(1, dtype=torch.int64), ends)).int()
        rows = torch.arange(len(tokens), device=device)
        switch = self.model.rope_switch
        long = None if switch is None else (sizes > switch).repeat_interleave(sizes).to(device)
        positions = positions.to(device)
        for cache in self._caches:  # masked places of blocks that are not full: 0 x NaN is NaN
            cache.index_fill_(2, (last - 1).to(device), 0)
        attention = [
            kernels.arrange(
                RaggedBatch(
                    slots.to(device),
                    starts.to(device),
                    sizes.int().to(device),
                    tables.to(device),
                    torch.arange(len(lengths), dtype=torch.int32, device=device),
                    max(lengths),
                    max(lengths),
                    group.window,
                    positions,
                ),
                _BLOCK,
                self._blocks,
            )
            for group in self.model.kv_groups
        ]
        return self.model.forward(tokens, positions, long, attention, self._caches, rows)

    def _reserve(self, blocks: int) -> None:
        """Make the caches hold so many blocks, and one more."""
        if blocks <= self._blocks:
            return
        self._caches.clear()  # first, so that there are never two
        self._blocks = blocks
        for group in self.model.kv_groups:
            self._caches.append(self.kernels.kv_cache(group, blocks + 1, _BLOCK, self.device))
        self.kernels.settle()


class Rows(Protocol):
    """A model that makes rows of texts."""

    device: torch.device

    def forward(self, tokens: Tensor, types: Tensor, lengths: Sequence[int]) -> Tensor:
        """See Encoder.forward."""


#: What is asked of a text: its request's, and the text's number in it.
AskedText = tuple[Pooling, int]


def numbers(row: Tensor) -> Sampled:
    """A text's result: a vector, the probabilities of labels, or a score."""
    values = row.float().tolist()
    finite = all(value - value == 0 for value in values)
    return Sampled(-1, row=values) if finite else Sampled(-1, error=NOT_FINITE)


class PoolingRunner:
    """An Executor (engine.execution.pipeline). Used by one thread."""

    def __init__(
        self, model: Rows, finish: Callable[[Tensor, Sequence[int], Sequence[AskedText]], list[Sampled]]
    ) -> None:
        """`finish`: makes each text's result, of the rows of all, their lengths and what is asked of each."""
        self._model = model
        self._finish = finish

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> list[Sampled]:
        """Execute a plan at once."""
        order = sorted(range(len(plan.rows)), key=lambda i: plan.rows[i].count)
        rows = [plan.rows[i] for i in order]
        device, lengths = self._model.device, [row.count for row in rows]
        tokens = torch.tensor([token for row in rows for token in row.seq.tokens], device=device)
        types = torch.cat([_types(row) for row in rows]).to(device)
        hidden = self._model.forward(tokens, types, lengths)
        results = self._finish(hidden, lengths, [(_pooling(row), row.seq.choice) for row in rows])
        sampled = [Sampled(-1)] * len(rows)
        for i, result in zip(order, results, strict=True):
            sampled[i] = result
        return sampled

    def collect(self, launched: list[Sampled]) -> list[Sampled]:
        """Return a launched plan's results."""
        return launched

    def copy_blocks(self, copies: list[tuple[int, int, int]]) -> None:
        """Nothing: there are no KV blocks."""

    def needs_token(self, sequence: Text) -> bool:
        """Always False: nothing is sampled."""
        return False

    def forget(self) -> None:
        """Nothing: no state is kept between steps."""


def _pooling(row: ScheduledSeq) -> Pooling:
    pooling = row.seq.request.pooling
    assert pooling is not None
    return pooling


def _types(row: ScheduledSeq) -> Tensor:
    """The token types of a text: 1 for the second text of a pair."""
    types = torch.zeros(row.count, dtype=torch.int64)
    seconds = _pooling(row).seconds
    if seconds:
        types[seconds[row.seq.choice] :] = 1
    return types
