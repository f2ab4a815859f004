"""Triton's interpreter, with the conversions and products that a GPU makes.

It computes with numpy, which has neither bfloat16 nor 8-bit floats. It keeps their bits as integers, cuts off where a
GPU rounds to bfloat16, loses the carry where 8 bits are rounded up to the next power of two, and takes bits for numbers
in matrix products and where integers become floats. Here torch converts, as IEEE 754 has it, so that kernels can be
compared to the last bit. Other arithmetic on such bits stays wrong: kernels compute in fp32. The interpreter also
counts with arrays of one element, which numpy 2.4 makes no integers of.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter

_FLOATS = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp32": torch.float32,
    "fp64": torch.float64,
    "fp8e4nv": torch.float8_e4m3fn,
    "fp8e5": torch.float8_e5m2,
}


def convert(bits: Any, source: Any, target: Any, rounding: Any) -> Any:
    """In place of `interpreter._convert_float`: numpy arrays of what interpreted tensors keep, and Triton's types."""
    whole = np.ascontiguousarray(bits)
    integers = {1: np.uint8, 2: np.int16, 4: np.int32, 8: np.int64}
    values = torch.from_numpy(whole.view(integers[whole.dtype.itemsize])).view(_FLOATS[source.name])
    if target.name == "fp8e4nv":
        # The instruction saturates; torch makes what is out of range a NaN.
        values = values.float().clamp(-448, 448)
    made = values.to(_FLOATS[target.name])
    return made.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[made.itemsize]).numpy()


def dot(builder: Any, a: Any, b: Any, d: Any, precision: Any, imprecise: Any) -> Any:
    """In place of `InterpreterBuilder.create_dot`: products of what the operands mean, summed in fp32."""
    left, right = (
        x.data.astype(np.float32)
        if x.data.dtype.kind == "f"
        else convert(x.data, x.dtype.scalar, tl.float32, None).view(np.float32)
        for x in (a, b)
    )
    return interpreter.TensorHandle(np.matmul(left, right) + d.data, d.dtype.scalar)


def dot_in_order(builder: Any, a: Any, b: Any, d: Any, precision: Any, imprecise: Any) -> Any:
    """As `dot`, each element summed from the first product to the last, wherever it is: the rows of a tensor core's
    product do not meet, but those of numpy's do, where they come to the edge of what it multiplies at once."""
    left, right = (
        x.data.astype(np.float32)
        if x.data.dtype.kind == "f"
        else convert(x.data, x.dtype.scalar, tl.float32, None).view(np.float32)
        for x in (a, b)
    )
    total = d.data.astype(np.float32)
    for k in range(left.shape[1]):
        total = total + left[:, k, None] * right[k]
    return interpreter.TensorHandle(total, d.dtype.scalar)


def from_integer(builder: Any, source: Any, target: Any) -> Any:
    """In place of `InterpreterBuilder.create_si_to_fp`."""
    if target.scalar.name not in ("bf16", "fp8e4nv", "fp8e5"):
        return builder.cast_impl(source, target)
    wide = source.data.astype(np.float32)
    return interpreter.TensorHandle(convert(wide, tl.float32, target.scalar, None), target.scalar)


def patch(tensor: Any, scope: Any) -> None:
    """In place of `interpreter._patch_lang_tensor`."""
    _patch_before(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())


def call(self: Any, *args: Any, **kwargs: Any) -> Any:
    """In place of `InterpretedFunction.__call__`, a kernel's call of another function.

    Without making anew for each call, which takes milliseconds, the changes to Triton's language that the kernel's
    launch has made, or that an earlier call has made for good.
    """
    ours = any(value is tl for value in self.fn.__globals__.values())
    if not ours and self.fn.__module__ not in _changed_for:
        interpreter._patch_lang(self.fn)
        _changed_for.add(self.fn.__module__)
    try:
        return self.rewrite()(*args, **kwargs)
    except Exception as error:
        raise interpreter.InterpreterError(repr(error)) from error


_changed_for: set[str] = set()
_patch_before = interpreter._patch_lang_tensor
interpreter._patch_lang_tensor = patch
interpreter._convert_float = convert
interpreter.InterpreterBuilder.create_si_to_fp = from_integer
interpreter.InterpreterBuilder.create_dot = dot
interpreter.InterpretedFunction.__call__ = call
# It looks for overflows of integers, which doubles their work, and which hashes have by intention.
interpreter.interpreter_builder.options = interpreter.InterpreterOptions(sanitize_overflow=False)
