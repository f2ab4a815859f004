"""The storage kinds of a KV cache, as stored.h has them."""

from __future__ import annotations

from typing import Final

from torch import Tensor

from engine.kernels.native.library import Library

#: The kinds of numbers, by the name of their type.
_KINDS: Final = {"float32": 0, "bfloat16": 1, "int8": 2, "fp8": 3}
_PAIRED: Final = 4
#: A paired cache has whole panels of this many places, and heads of whole steps of this many dimensions.
_PANEL, _STEP = 16, 32


class Storage:
    """The storage of one kernel set's caches."""

    def __init__(self, library: Library, name: str) -> None:
        """`name`: float32, bfloat16, int8 or fp8."""
        self._kind, self._pairs = _KINDS[name], library.paired and name == "bfloat16"

    def kind(self, cache: Tensor) -> int:
        """The kind of `cache`, [..., blocks, block_size, kv_heads, width].

        This is the one place that decides which caches are paired (paired.h). A cache has one shape for life, so it is
        written and read alike. Others of the same type keep the order of their shape, and attention in fp32.
        """
        block, _, width = cache.shape[-3:]
        return _PAIRED if self._pairs and block % _PANEL == 0 and width % _STEP == 0 else self._kind
