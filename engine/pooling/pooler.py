"""Makes one row of each sequence's rows: pooling, dense layers, normalisation, as Sentence-Transformers does.

Each sequence is pooled by itself, so its vector does not depend on its batch.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Final

import torch
import torch.nn.functional as F
from safetensors import safe_open
from torch import Tensor

from engine.errors import ModelError
from engine.models.encoder import ACTIVATIONS
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
    """The vector at length 1."""
    return F.normalize(vector, dim=0, eps=_SHORTEST)


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
