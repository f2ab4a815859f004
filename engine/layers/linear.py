"""A matrix product. Its weight may be several matrices of a checkpoint, stacked."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from engine.kernels import Kernels, PreparedLinear
from engine.layers.adapted import AdaptedRows
from engine.quant.formats import Quantised, Stored, stacked


class Linear:
    """A matrix product. `parts`: the checkpoint's matrices and their outputs, in order, such as {"q_proj": 576,
    ...}."""

    def __init__(
        self,
        kernels: Kernels,
        inputs: int,
        parts: dict[str, int],
        *,
        bias: bool,
        device: torch.device,
        head: bool = False,
    ) -> None:
        """`head`: whether the product makes logits, of tokens or of experts."""
        self.inputs, self.parts, self.device = inputs, parts, device
        self.makes_logits = head
        self._kernels = kernels
        self._prepare = kernels.prepare_head if head else kernels.prepare_linear
        self._stored: dict[str, Stored] = {}
        self._biased = frozenset(parts if bias else ())
        self._weights: dict[str, Tensor] = {}
        self._biases: dict[str, Tensor] = {}
        self._weight: Tensor | None = None
        self._bias: Tensor | None = None
        self._run: PreparedLinear | None = None

    def store(self, stored: dict[str, Stored], biased: Iterable[str]) -> None:
        """Set the parts that the checkpoint has quantised, and the parts that have a bias there although the
        architecture has none (old quantisers wrote zeros). Call it before `weights`."""
        self._stored = stored
        self._biased |= frozenset(biased)

    def weights(self, prefix: str) -> dict[str, Tensor]:
        if self._run is not None:
            raise RuntimeError("the weights of a packed Linear cannot be loaded again")
        if self._weight is None:
            self._allocate()
        places: dict[str, Tensor] = {}
        for name in self.parts:
            if name in self._stored:
                places |= {f"{prefix}{name}.{end}": tensor for end, tensor in self._stored[name].places.items()}
            else:
                places[f"{prefix}{name}.weight"] = self._weights[name]
            if name in self._biased:
                places[f"{prefix}{name}.bias"] = self._biases[name]
        return places

    def _allocate(self) -> Tensor:
        kernels, device = self._kernels, self.device
        dense = {name: outputs for name, outputs in self.parts.items() if name not in self._stored}
        self._weight = torch.empty(sum(dense.values()), self.inputs, dtype=kernels.weight_dtype, device=device)
        self._weights = dict(zip(dense, torch.split(self._weight, list(dense.values())), strict=True))
        if self._biased:
            # Parts without a bias keep zeros.
            self._bias = torch.zeros(sum(self.parts.values()), dtype=kernels.compute_dtype, device=device)
            self._biases = dict(zip(self.parts, torch.split(self._bias, list(self.parts.values())), strict=True))
        return self._weight

    def pack(self) -> None:
        """Hand the weight to the kernel set, which may keep it in its own layout. This layer drops its copy."""
        if self._run is not None:
            raise RuntimeError("a Linear is packed once")
        weight = self._weight if self._weight is not None else self._allocate()
        self._run = self._prepare_parts() if self._stored else self._prepare(weight, self._bias)
        self._weight, self._weights, self._stored = None, {}, {}

    def _prepare_parts(self) -> PreparedLinear:
        """One product if all parts are quantised alike, else one for each part."""
        parts = [self._stored[name].read() if name in self._stored else self._weights[name] for name in self.parts]
        quantised = [part for part in parts if isinstance(part, Quantised)]
        whole = stacked(quantised) if len(quantised) == len(parts) else None
        if whole is not None:
            return whole.on(self.device).prepare(self._kernels, self._bias)
        biases = [self._biases.get(name) for name in self.parts]
        runs = [
            part.on(self.device).prepare(self._kernels, bias)
            if isinstance(part, Quantised)
            else self._prepare(part, bias)
            for part, bias in zip(parts, biases, strict=True)
        ]
        return lambda x: torch.cat([run(x) for run in runs], 1)

    def replace(self, make: Callable[[PreparedLinear], PreparedLinear]) -> PreparedLinear:
        """Replace the prepared product by `make(product)`. Returns the old one."""
        run = self._run
        if run is None:
            raise RuntimeError("a Linear is packed before it is replaced")
        self._run = make(run)
        return run

    @property
    def prepared(self) -> PreparedLinear:
        if self._run is None:
            raise RuntimeError("a Linear is packed before it is called")
        return self._run

    def __call__(self, x: Tensor, adapters: AdaptedRows | None = None) -> Tensor:
        out = self.prepared(x)
        if adapters is not None:
            adapters.add(self, x, out)
        return out
