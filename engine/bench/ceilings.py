"""Measures the limits of this machine, memory bandwidth and rate of multiplication, and the least time that a workload
takes by them.

Each step reads every weight of a product once, and the keys and values that its sequences see. Both count in the bytes
in which they are kept (numbers of 4 and 8 bits with their scales). Each token takes a multiplication and an addition
for each such weight. Of experts, only as many count as a row goes through. A step, or a prompt, takes at least the
longer of both times. Nothing else is counted, so no engine reaches the limit. The limits are the best measured here of
torch's sum and product, and of this engine's products of one row and of many.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from engine.kernels import select
from engine.kernels.fallback import computes_natively
from engine.models import Model
from engine.text.checkpoint import HEADS, NO_PARAMETERS, PACKED
from engine.text.config import Config, packed_bits, read_config
from engine.text.tensors import locate

#: The numbers to sum: 256 MiB in fp32, larger than any cache.
_NUMBERS = 1 << 26
#: (rows, inputs, outputs) of the timed product, as large as those of a long prompt.
_PRODUCT = (512, 2048, 2048)
#: [outputs, inputs] of the weight that is read for one row, also larger than any cache.
_WEIGHT = (8192, 8192)
_TRIES = 5


@dataclass(frozen=True, slots=True)
class Ceilings:
    """The machine's limits, with torch's number of threads."""

    read_bytes_per_s: float
    operations_per_s: float
    """Multiplications and additions per second, in the fastest dtype in which the weights' products may be computed."""

    @classmethod
    def measure(cls, dtype: torch.dtype) -> Ceilings:
        """Measure the limits, as the best of a few tries. `dtype`: of the weights."""
        numbers = torch.ones(_NUMBERS)
        reads = [numbers.nbytes / _least_s(numbers.sum)]
        del numbers
        rows, inputs, outputs = _PRODUCT
        operations = 2 * math.prod(_PRODUCT)
        rates = []
        for weight_dtype in {torch.float32, dtype if computes_natively(dtype) else torch.float32}:
            x, weight = torch.ones(rows, inputs, dtype=weight_dtype), torch.ones(inputs, outputs, dtype=weight_dtype)
            rates.append(operations / _least_s(partial(torch.mm, x, weight)))
        kernels = select(torch.device("cpu"), dtype)
        product = kernels.prepare_linear(torch.ones(outputs, inputs, dtype=kernels.weight_dtype), None)
        rates.append(operations / _least_s(partial(product, torch.ones(rows, inputs, dtype=kernels.compute_dtype))))
        large = torch.ones(_WEIGHT, dtype=kernels.weight_dtype)
        size, product = large.nbytes, kernels.prepare_linear(large, None)
        del large
        reads.append(size / _least_s(partial(product, torch.ones(1, _WEIGHT[1], dtype=kernels.compute_dtype))))
        return cls(max(reads), max(rates))


@dataclass(frozen=True, slots=True)
class Work:
    """The work of a model's steps."""

    weights: int
    """The number of weights of all products that a row goes through, the head's included."""
    head: int
    """The number of weights of the output head, which runs once for a prompt."""
    weight_bytes: int
    """The bytes of these products' weights and scales, as the kernel set keeps them. A step reads no fewer; of experts,
    several rows may read more."""
    kv: tuple[tuple[int, int | None], ...]
    """For each KV group, the bytes of one token's keys and values in all of its layers, scales included; and its
    window."""
    layers: int
    """The number of layers, taken to be alike. Only a prompt's last token goes through the whole last layer."""

    @classmethod
    def of(cls, model: Model, folder: str | Path) -> Work:
        """The work of a model that was loaded from `folder`. Raises ModelError."""
        kernels, config = model.kernels, read_config(Path(folder))
        bits, numbers = packed_bits(config), dict[str, int]()
        for name, located in locate(Path(folder)).items():
            matrix, _, end = name.rpartition(".")
            if matrix.endswith(HEADS) and end not in NO_PARAMETERS:
                per_word = 32 // bits(matrix) if end in PACKED else 1
                numbers[matrix] = math.prod(located.stored.shape) * per_word
        # A tied table is the head as well. An untied one is only looked up.
        heads = [name for name in numbers if name.endswith("lm_head")] or list(numbers)
        idle = _idle(model, Config.of_model(config))
        return cls(
            weights=kernels.weights - idle,
            head=sum(numbers[name] for name in heads),
            weight_bytes=kernels.weight_bytes * (kernels.weights - idle) // kernels.weights,
            kv=tuple(
                (
                    2
                    * group.layers
                    * group.kv_heads
                    * kernels.cache_width(group.head_dim)
                    * kernels.cache_dtype.itemsize,
                    group.window,
                )
                for group in model.kv_groups
            ),
            layers=sum(group.layers for group in model.kv_groups),
        )

    def least_s(self, jobs: Sequence[tuple[int, int]], ceilings: Ceilings) -> float:
        """The least seconds for jobs of (prompt tokens, output tokens) that all arrive at once."""
        prompts = sum(prompt for prompt, _ in jobs)
        last = (self.weights - self.head) / self.layers
        operations = 2 * (prompts * (self.weights - self.head - last) + len(jobs) * (self.head + last))
        total = max(operations / ceilings.operations_per_s, self.weight_bytes / ceilings.read_bytes_per_s)
        for step in range(1, max(output for _, output in jobs)):
            going = [prompt + step for prompt, output in jobs if output > step]
            kv_bytes = sum(
                size * (sum(going) if window is None else sum(min(window, length) for length in going))
                for size, window in self.kv
            )
            by_memory = (self.weight_bytes + kv_bytes) / ceilings.read_bytes_per_s
            total += max(by_memory, 2 * self.weights * len(going) / ceilings.operations_per_s)
        return total


def _idle(model: Model, config: Config) -> int:
    """The number of weights of the experts that a row does not go through."""
    numbers = {prefix: 0 for prefix, _ in model.linears() if ".experts." in prefix}
    for prefix, linear in model.linears():
        if prefix in numbers:
            numbers[prefix] += linear.inputs * sum(linear.parts.values())
    if not numbers:
        return 0
    # All experts are of one size.
    layers = Counter(prefix.partition(".experts.")[0] for prefix in numbers)
    return sum(count - config.integer("num_experts_per_tok") for count in layers.values()) * max(numbers.values())


def _least_s(call: Callable[[], object]) -> float:
    call()
    times = []
    for _ in range(_TRIES):
        began = time.perf_counter()
        call()
        times.append(time.perf_counter() - began)
    return min(times)
