"""GPUs, and the least time of a step on one, from the bytes it must read and write and the multiplications it makes.

   step    the sum of: dense layers (the longer of reading the weights and multiplying by them), attention (the longer
           of reading the cached keys and values and multiplying by them), and the data passed between kernels
   prefill multiplications alone; the head counts only for sampled tokens
   offline in each step, the longer of all reading and all multiplying, as if one could hide behind the other wholly,
           which no engine reaches

For Llama 3.1 8B in bf16 on an H200, at a context of 1,024 tokens, these are 3.52, 4.01, 5.59 and 13.3 ms at batch 1,
16, 64 and 256, and 54,800 prompt tokens/s.

Method: S. Williams, A. Waterman, D. Patterson, "Roofline", CACM 52 (2009).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from engine.models.families import FAMILIES
from engine.models.settings import DecoderSettings
from engine.text.config import Config, architectures


@dataclass(frozen=True, slots=True)
class Speed:
    """Rates that a GPU reaches in practice, below those of its data sheet."""

    bytes_per_s: float
    flops_per_s: float


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU by its data sheet: memory and bandwidth in units of 10^9 and 10^12 bytes, dense rates (without sparsity) in
    10^12 operations a second. `fp8_tflops`: None before compute capability 8.9, which has no such products."""

    name: str
    memory_gb: float
    tb_per_s: float
    tflops: float
    fp8_tflops: float | None
    source: str
    link_gb_per_s: float = 32.0
    """What it sends to other GPUs of its machine, each way, in units of 10^9 bytes a second, by the same documents:
    NVLink's, or 32 of PCIe 4 and 64 of PCIe 5."""
    torch_name: str = ""
    """Words of torch's name of it; "": the engine was never measured there."""

    @property
    def memory_bytes(self) -> float:
        """Its memory as the data sheet counts it; drivers show up to 7% more."""
        return self.memory_gb * 1e9

    def speed(self, *, fp8: bool = False) -> Speed:
        """The best rates that are reached in practice. Measured on H200 and H100; elsewhere the same shares of the data
        sheet."""
        tflops = self.fp8_tflops if fp8 and self.fp8_tflops is not None else self.tflops
        return Speed(self.tb_per_s * 1e12 * READ_SHARE, tflops * 1e12 * MULTIPLY_SHARE)


#: Shares of the data sheet that torch's sum and cuBLAS's largest products reached: 4.3 of 4.8 TB/s on the H200 and 3.0
#: of 3.35 on the H100, 780 of 989 TFLOP/s on both (docs/notes/gpu-limits.md).
READ_SHARE: Final = 4.3 / 4.8
MULTIPLY_SHARE: Final = 780 / 989
#: The seconds of a sum of few rows over the GPUs of a machine: a guess, as no machine with several has run it.
SUM_S: Final = 10e-6

#: GPUs from compute capability 8.0 on. Sources are NVIDIA's documents of these names, as of 2026-11. Data sheets that
#: give rates with sparsity have twice these numbers. The consumer cards' rates are those with sums in fp32.
GPUS: Final = tuple(
    Gpu(*row)
    for row in (
        ("RTX 3090", 24, 0.936, 71, None, "GA102 GPU Architecture whitepaper v2"),
        ("RTX 4090", 24, 1.008, 165.2, 330.3, "Ada GPU Architecture whitepaper v2"),
        ("A10", 24, 0.600, 125, None, "A10 Tensor Core GPU data sheet"),
        ("L4", 24, 0.300, 121, 242, "L4 Tensor Core GPU data sheet"),
        ("A100 40GB", 40, 1.555, 312, None, "A100 Tensor Core GPU data sheet (40 GB)", 300),
        ("L40S", 48, 0.864, 362, 733, "L40S GPU data sheet"),
        ("A100 80GB", 80, 1.935, 312, None, "A100 Tensor Core GPU data sheet (80 GB PCIe)"),
        ("H100 PCIe", 80, 2.0, 756, 1513, "H100 Tensor Core GPU data sheet (PCIe)", 64),
        ("H100", 80, 3.35, 989, 1979, "H100 Tensor Core GPU data sheet (SXM)", 450, "H100 80GB HBM3"),
        ("H100 NVL", 94, 3.9, 835, 1671, "H100 Tensor Core GPU data sheet (NVL)", 300),
        ("H200", 141, 4.8, 989, 1979, "H200 Tensor Core GPU data sheet (SXM)", 450, "H200"),
        ("B200", 180, 8.0, 2250, 4500, "DGX B200 data sheet, an eighth", 900),
    )
)


def speed_of(name: str) -> Speed | None:
    """The speed of a GPU by torch's name of it. None where it was never measured. Only whole words of the name count,
    so GH200 is not H200; H100s for PCIe and NVL have other memory and less power."""
    matches = (gpu for gpu in GPUS if gpu.torch_name and f" {gpu.torch_name} " in f" {name} ")
    return next((gpu.speed() for gpu in matches), None)


@dataclass(frozen=True, slots=True)
class Work:
    """The work of one model's steps. Sizes are numbers of elements, unless they say bytes."""

    layers: int
    """Of the layers' matrices, without experts."""
    head: int
    """Of the head's matrix, which only a prompt's last token goes through."""
    experts: int
    """Of all experts of all layers."""
    chosen: float
    """Share of the experts that a row goes through."""
    kv: tuple[tuple[float, int, int | None], ...]
    """For each KV group: the bytes of one token's keys and values in all of its layers; the multiplications and
    additions of attention for each token seen; its window."""
    passed: int
    """Of the data that one kernel writes and another reads, for each row."""
    weight_bytes: float = 2.0
    """Bytes of an element of these matrices."""
    sums: int = 0
    """Of a step's rows over the ranks of a model, where several compute it."""
    width: int = 0
    """Of a row."""
    kv_heads: int = 1
    """Of a layer; of more ranks several hold the same one."""

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Work:
        """The work of a decoder with this config.json, with weights and cache of two bytes an element.

        Raises ModelError for a setting that the engine cannot serve.
        """
        name = next(name for name in architectures(config) if name in FAMILIES)
        return cls.of_settings(FAMILIES[name].read(Config.of_model(config)))

    @classmethod
    def of_settings(cls, c: DecoderSettings, weight_bytes: float = 2.0, kv_bytes: float = 2.0) -> Work:
        """The same of a decoder's settings. `kv_bytes`: of an element of the cache."""
        queries, heads_out = c.heads * c.head_dim, (c.heads + 2 * c.kv_heads) * c.head_dim
        dense = c.layers if c.experts is None else len(c.dense)
        sparse = c.layers - dense
        attention = c.hidden_size * heads_out + queries * c.hidden_size
        matrices = c.layers * attention + dense * 3 * c.hidden_size * c.intermediate_size
        experts, chosen, wide = 0, 0.0, c.intermediate_size
        if c.experts is not None and sparse:
            matrices += sparse * c.hidden_size * c.experts.count  # the router
            experts = sparse * c.experts.count * 3 * c.hidden_size * c.experts.width
            chosen, wide = c.experts.chosen / c.experts.count, c.experts.chosen * c.experts.width
        # For each row: q, k, v; attention's output and its projection; the sum and the norm after it; gate times up,
        # multiplied in one kernel; its projection; sum and norm; the logits.
        between = heads_out + queries + c.hidden_size + 2 * c.hidden_size + wide + c.hidden_size + 2 * c.hidden_size
        groups = tuple(
            (group.layers * 2 * group.kv_heads * group.head_dim * kv_bytes, group.layers * 4 * queries, group.window)
            for group in c.kv_groups
        )
        return cls(
            layers=matrices,
            head=c.hidden_size * c.vocab_size,
            experts=experts,
            chosen=chosen,
            kv=groups,
            passed=2 * (c.layers * between + c.vocab_size),
            weight_bytes=weight_bytes,
            sums=2 * c.layers,
            width=c.hidden_size,
            kv_heads=c.kv_heads,
        )

    @property
    def kv_bytes(self) -> float:
        """Bytes of one token's keys and values, in all layers."""
        return sum(size for size, _, _ in self.kv)

    def kv_bytes_of(self, tokens: float) -> float:
        """Bytes of the keys and values of a sequence of so many tokens: less where layers have a window."""
        return sum(size * _attended(tokens, window) for size, _, window in self.kv)

    def read_bytes(self, batch: float) -> float:
        """Bytes of the weights that a step of `batch` rows reads. Rows that choose experts by chance need these more
        than once."""
        experts = self.experts * (1 - math.pow(1 - self.chosen, batch))
        return (self.layers + self.head + experts) * self.weight_bytes

    def row_flops(self, *, head: bool = True) -> float:
        """Multiplications and additions of a row's products."""
        return 2 * (self.layers + self.experts * self.chosen + (self.head if head else 0))

    def kv_copies(self, ranks: int) -> float:
        """The number of copies of each key and value that so many ranks hold."""
        return max(1.0, ranks / self.kv_heads)

    def step_s(self, speed: Speed, batch: float, context: float, kv_copies: float = 1.0) -> float:
        """The least seconds of a step in which `batch` sequences decode, with `context` tokens before each on
        average. `kv_copies`: how often each key and value is read."""
        dense = max(self.read_bytes(batch) / speed.bytes_per_s, self.row_flops() * batch / speed.flops_per_s)
        attention = max(
            batch * self.kv_bytes_of(context) * kv_copies / speed.bytes_per_s,
            batch * self._attention_flops(context) / speed.flops_per_s,
        )
        return dense + attention + batch * self._passed_bytes() / speed.bytes_per_s

    def step_of_ranks_s(self, gpu: Gpu, ranks: int, batch: float, context: float, *, fp8: bool = False) -> float:
        """The least seconds of a step that `ranks` GPUs of one machine compute together, each its part of every matrix.

        A sum over all ranks, two in each layer, takes as long as a ring needs to pass the rows, and at least SUM_S.
        """
        if ranks == 1:
            return self.step_s(gpu.speed(fp8=fp8), batch, context)
        passed = 2 * (ranks - 1) / ranks * batch * self.width * 2 / (gpu.link_gb_per_s * 1e9)
        step = self.step_s(gpu.speed(fp8=fp8), batch, context, self.kv_copies(ranks))
        return step / ranks + self.sums * (SUM_S + passed)

    def prefill_tokens_per_s(self, speed: Speed, length: float) -> float:
        """The most prompt tokens a second, with prompts of `length`. Each token sees half of its prompt on average."""
        return speed.flops_per_s / (self.row_flops(head=False) + self._attention_flops(length / 2))

    def offline_tokens_per_s(self, speed: Speed, batch: int, prompt: int, output: int) -> float:
        """The most output tokens a second if `batch` prompts arrive at once and each generates `output` tokens."""
        context = prompt + output / 2
        read = self.read_bytes(batch) + batch * (self.kv_bytes_of(context) + self._passed_bytes())
        flops = batch * (self.row_flops() + self._attention_flops(context))
        decode = output * max(read / speed.bytes_per_s, flops / speed.flops_per_s)
        return batch * output / (batch * prompt / self.prefill_tokens_per_s(speed, prompt) + decode)

    def with_weights(self, weight_bytes: float) -> Work:
        """The same model with another number of bytes for an element of its matrices."""
        return replace(self, weight_bytes=weight_bytes)

    def _attention_flops(self, context: float) -> float:
        return sum(flops * _attended(context, window) for _, flops, window in self.kv)

    def _passed_bytes(self) -> float:
        return 2.0 * self.passed


def _attended(tokens: float, window: int | None) -> float:
    return tokens if window is None else min(tokens, window)
