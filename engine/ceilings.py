"""What this machine could do at best: its memory's bandwidth and its rate of multiplication, measured on the spot, and
the least time that a workload takes by them.

Each step reads every weight of a product once, and the keys and values of every sequence that it goes on with; each
token takes a multiplication and an addition for each such weight. A step takes at least the longer of both, prompts
likewise; nothing else is counted, so no engine reaches it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from engine.kernels.cpu import computes_natively
from engine.models import Model
from engine.models.loader import locate
from engine.text.checkpoint import HEADS, NO_PARAMETERS, PACKED
from engine.text.config import packed_bits, read_config

#: Larger than any cache: 256 MiB in fp32.
_NUMBERS = 1 << 26
#: (rows, inputs, outputs) of the product that is timed: as large as those of a long prompt.
_PRODUCT = (512, 2048, 2048)
_TRIES = 5


@dataclass(frozen=True, slots=True)
class Ceilings:
    """Of the threads that torch has."""

    read_bytes_per_s: float
    operations_per_s: float
    """Multiplications and additions, in the fastest dtype that the weights' products may be computed in."""

    @classmethod
    def measure(cls, dtype: torch.dtype) -> Ceilings:
        """The best of a few tries of torch's own sum and product. `dtype`: of the weights."""
        numbers = torch.ones(_NUMBERS)
        read = numbers.nbytes / _least_s(lambda: numbers.sum())
        rows, inputs, outputs = _PRODUCT
        computed = {torch.float32, dtype if computes_natively(dtype) else torch.float32}
        rates = []
        for one in computed:
            x, weight = torch.ones(rows, inputs, dtype=one), torch.ones(inputs, outputs, dtype=one)
            rates.append(2 * math.prod(_PRODUCT) / _least_s(partial(torch.mm, x, weight)))
        return cls(read, max(rates))


@dataclass(frozen=True, slots=True)
class Work:
    """What a model's steps take."""

    weights: int
    """Of all products, the head's too."""
    head: int
    """Of the output head: a prompt takes it once."""
    weight_bytes: float
    """On average, with the scales of those that are quantised."""
    kv_bytes: int
    """Keys and values of one token, in all layers."""

    @classmethod
    def of(cls, model: Model, folder: str | Path) -> Work:
        """By the checkpoint's tensors and in the model's own dtypes; quantised matrices are read as they are stored.
        Raises ModelError."""
        kernels, config = model.kernels, read_config(Path(folder))
        numbers: dict[str, int] = {}
        read = 0
        for name, found in locate(Path(folder)).items():
            matrix, _, end = name.rpartition(".")
            size = math.prod(found.stored.shape)
            if end in PACKED:
                numbers[matrix] = size * (32 // packed_bits(config, head=matrix.endswith(HEADS)))
            elif end not in NO_PARAMETERS and len(found.stored.shape) == 2:
                numbers[matrix] = size
                read += 0 if found.stored.dtype == "I8" else size * kernels.weight_dtype.itemsize
            if end in PACKED | NO_PARAMETERS or found.stored.dtype == "I8":
                read += found.stored.nbytes
        tables = [name for name in numbers if name.endswith("embed_tokens")]
        heads = [name for name in numbers if name.endswith("lm_head")]
        # A tied table is the head as well; one that is not is only looked up.
        looked_up = sum(numbers[name] for name in tables) if heads else 0
        weights = sum(numbers.values()) - looked_up
        return cls(
            weights=weights,
            head=sum(numbers[name] for name in heads or tables),
            weight_bytes=(read - looked_up * kernels.weight_dtype.itemsize) / weights,
            kv_bytes=sum(
                2 * group.layers * group.kv_heads * kernels.cache_width(group.head_dim) * kernels.cache_dtype.itemsize
                for group in model.kv_groups
            ),
        )

    def least_s(self, jobs: Sequence[tuple[int, int]], ceilings: Ceilings) -> float:
        """Seconds that jobs of (prompt tokens, output tokens), all there at once, take at the least."""
        prompts = sum(prompt for prompt, _ in jobs)
        operations = 2 * (prompts * (self.weights - self.head) + len(jobs) * self.head)
        read = self.weights * self.weight_bytes
        total = max(operations / ceilings.operations_per_s, read / ceilings.read_bytes_per_s)
        for step in range(1, max(output for _, output in jobs)):
            going = [prompt + step for prompt, output in jobs if output > step]
            by_memory = (read + self.kv_bytes * sum(going)) / ceilings.read_bytes_per_s
            total += max(by_memory, 2 * self.weights * len(going) / ceilings.operations_per_s)
        return total


def _least_s(call: Callable[[], object]) -> float:
    call()
    times = []
    for _ in range(_TRIES):
        began = time.perf_counter()
        call()
        times.append(time.perf_counter() - began)
    return min(times)
