"""The least time of a step on a GPU, from the bytes it must read and write and the multiplications it must make.

   step    the sum of: dense layers (the longer of reading the weights and multiplying by them), attention (the longer
           of reading the cached keys and values and multiplying by them), and the data passed between kernels
   prefill multiplications alone; the head counts only for sampled tokens
   offline in each step, the longer of all reading and all multiplying, as if one could hide behind the other wholly,
           which no engine reaches

For Llama 3.1 8B in bf16 on an H200, at a context of 1,024 tokens, these are 3.52, 4.01, 5.59 and 13.3 ms at batch 1,
16, 64 and 256, and 54,800 prompt tokens/s.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Speed:
    """The best rates that a GPU reaches in practice, below those of its data sheet."""

    bytes_per_s: float
    flops_per_s: float


#: The speeds in bf16 by words of torch's name of the GPU. Data sheets: H200 4.8 TB/s and 989 TFLOP/s, H100 SXM5 3.35
#: TB/s and 989 TFLOP/s. H100s for PCIe and NVL are not listed, because they have other memory and less power.
SPEEDS = {"H200": Speed(4.3e12, 780e12), "H100 80GB HBM3": Speed(3.0e12, 780e12)}


def speed_of(name: str) -> Speed | None:
    """The speed of a GPU. None if it is not listed. Only whole words of the name count, so GH200 is not H200."""
    return next((speed for words, speed in SPEEDS.items() if f" {words} " in f" {name} "), None)


class Work:
    """The work of one model shape (a Llama's config.json), with `width` bytes for each element."""

    def __init__(self, config: Mapping[str, Any], width: int = 2) -> None:
        layers, hidden = config["num_hidden_layers"], config["hidden_size"]
        wide, head_dim = config["intermediate_size"], config["head_dim"]
        heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
        queries, heads_out = heads * head_dim, (heads + 2 * kv_heads) * head_dim
        self._width = width
        #: The elements of the layers' matrices, and of the head, which only a prompt's last token goes through.
        self._layers = layers * (hidden * heads_out + queries * hidden + 3 * hidden * wide)
        self._head = hidden * config["vocab_size"]
        #: The bytes of one token's keys and values, and twice the multiplications of attention for each token seen.
        self.kv_bytes = layers * 2 * kv_heads * head_dim * width
        self._attention_flops = layers * 4 * queries
        # The data that one kernel writes and another reads, for each token: q, k, v; attention's output and its
        # projection; the sum and the norm after it; gate times up, multiplied in one kernel; its projection; sum and
        # norm; the logits.
        between = heads_out + queries + hidden + 2 * hidden + wide + hidden + 2 * hidden
        self._passed_bytes = 2 * width * (layers * between + config["vocab_size"])

    def step_s(self, speed: Speed, batch: int, context: float) -> float:
        """The least seconds of a step in which `batch` sequences decode, with `context` tokens before each on
        average."""
        weights = self._layers + self._head
        dense = max(weights * self._width / speed.bytes_per_s, 2 * weights * batch / speed.flops_per_s)
        seen = batch * context
        attention = max(seen * self.kv_bytes / speed.bytes_per_s, seen * self._attention_flops / speed.flops_per_s)
        return dense + attention + batch * self._passed_bytes / speed.bytes_per_s

    def prefill_tokens_per_s(self, speed: Speed, length: int) -> float:
        """The most prompt tokens a second, with prompts of `length`. Each token sees half of its prompt on average."""
        return speed.flops_per_s / (2 * self._layers + self._attention_flops * length / 2)

    def offline_tokens_per_s(self, speed: Speed, batch: int, prompt: int, output: int) -> float:
        """The most output tokens a second if `batch` prompts arrive at once and each generates `output` tokens."""
        weights = self._layers + self._head
        seen = batch * (prompt + output / 2)
        read = weights * self._width + seen * self.kv_bytes + batch * self._passed_bytes
        flops = 2 * weights * batch + seen * self._attention_flops
        decode = output * max(read / speed.bytes_per_s, flops / speed.flops_per_s)
        return batch * output / (batch * prompt / self.prefill_tokens_per_s(speed, prompt) + decode)
