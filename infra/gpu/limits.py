"""The least time that a step can take on a GPU: what must be read and written, and what must be multiplied.

    step    dense layers (the longer of reading the weights and multiplying by them), then attention (of reading the
            cached keys and values and multiplying by them), then what passes between kernels: each one after the other
    prefill multiplications alone; the head only where a token is sampled
    offline all of a run's reading, or all of its multiplying, whichever is longer in each step: as if one could hide
            behind the other wholly, which is more than any engine reaches

For Llama 3.1 8B in bf16 on an H200, at a context of 1,024 tokens, these are 3.52, 4.01, 5.59 and 13.3 ms at batch 1,
16, 64 and 256, and 54,800 prompt tokens/s.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Speed:
    """What a GPU reaches at best in practice, of what its data sheet promises."""

    bytes_per_s: float
    flops_per_s: float


#: By words of torch's name of the GPU; bf16. H200: of 4.8 TB/s and 989 TFLOP/s. H100 SXM5: of 3.35 and 989; those for
#: PCIe and of two joined (NVL) have other memory and less power.
SPEEDS = {"H200": Speed(4.3e12, 780e12), "H100 80GB HBM3": Speed(3.0e12, 780e12)}


def speed_of(name: str) -> Speed | None:
    """None for a GPU that is not listed, GH200 among them: only whole words of the name count."""
    return next((speed for words, speed in SPEEDS.items() if f" {words} " in f" {name} "), None)


class Work:
    """Of one model shape, as its config.json has it (a Llama), with `width` bytes an element."""

    def __init__(self, config: Mapping[str, Any], width: int = 2) -> None:
        layers, hidden = config["num_hidden_layers"], config["hidden_size"]
        wide, head_dim = config["intermediate_size"], config["head_dim"]
        heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
        queries, heads_out = heads * head_dim, (heads + 2 * kv_heads) * head_dim
        self._width = width
        #: Elements of the layers' matrices, and of the head, which no prompt token but the last goes through.
        self._layers = layers * (hidden * heads_out + queries * hidden + 3 * hidden * wide)
        self._head = hidden * config["vocab_size"]
        #: Keys and values of one token, in bytes; multiplications for each token that is looked at, times two.
        self.kv_bytes = layers * 2 * kv_heads * head_dim * width
        self._attention_flops = layers * 4 * queries
        # What one kernel writes and another reads, of each token: q, k, v; attention's output and its projection; the
        # sum and the norm after it; gate times up, multiplied where it is made; its projection; sum and norm. Then
        # the logits.
        between = heads_out + queries + hidden + 2 * hidden + wide + hidden + 2 * hidden
        self._passed_bytes = 2 * width * (layers * between + config["vocab_size"])

    def step_s(self, speed: Speed, batch: int, context: float) -> float:
        """Least seconds of a step in which `batch` sequences decode, each with so many tokens before it on average."""
        weights = self._layers + self._head
        dense = max(weights * self._width / speed.bytes_per_s, 2 * weights * batch / speed.flops_per_s)
        seen = batch * context
        attention = max(seen * self.kv_bytes / speed.bytes_per_s, seen * self._attention_flops / speed.flops_per_s)
        return dense + attention + batch * self._passed_bytes / speed.bytes_per_s

    def prefill_tokens_per_s(self, speed: Speed, length: int) -> float:
        """Most prompt tokens a second, in prompts of `length`: each token looks at half of them on average."""
        return speed.flops_per_s / (2 * self._layers + self._attention_flops * length / 2)

    def offline_tokens_per_s(self, speed: Speed, batch: int, prompt: int, output: int) -> float:
        """Most output tokens a second where `batch` prompts come at once and each makes `output` tokens."""
        weights = self._layers + self._head
        seen = batch * (prompt + output / 2)
        read = weights * self._width + seen * self.kv_bytes + batch * self._passed_bytes
        flops = 2 * weights * batch + seen * self._attention_flops
        decode = output * max(read / speed.bytes_per_s, flops / speed.flops_per_s)
        return batch * output / (batch * prompt / self.prefill_tokens_per_s(speed, prompt) + decode)
