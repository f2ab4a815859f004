"""A quantised matrix in its checkpoint's own tensors: a class for each format, and `stored_as`, which detects it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from engine.errors import ModelError
from engine.kernels import Kernels, PreparedLinear
from engine.kernels.packed import MIDDLE
from engine.quant.formats.gguf import unpacked as unpacked_blocks
from engine.quant.formats.matrix import Matrix, Quantised, grouped_order
from engine.quant.formats.scheme import Form, Scheme
from engine.text.tensors import BLOCKS, KEPT, StoredTensor

_FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
#: The place of each of 8 outputs in its word.
_PLACES: Final = (0, 4, 1, 5, 2, 6, 3, 7)


class Stored(ABC):
    """A matrix in its stored format. The loader fills `places` with the checkpoint's tensors, then calls `read`
    once."""

    def __init__(
        self,
        name: str,
        outputs: int,
        inputs: int,
        scheme: Scheme,
        headers: Mapping[str, StoredTensor],
        device: torch.device,
    ) -> None:
        """`headers`: the header entries of the matrix's tensors, by their name suffixes. Raises ModelError for a shape
        that the scheme cannot have."""
        self.name, self.outputs, self.inputs, self.scheme = name, outputs, inputs, scheme
        self.headers, self.device = headers, device
        self.places: dict[str, Tensor] = self.empty_tensors()
        """The tensors by their name suffixes. The first is the matrix itself."""

    @abstractmethod
    def empty_tensors(self) -> dict[str, Tensor]:
        """Allocate the empty tensors that the scheme asks for."""

    @abstractmethod
    def read(self) -> Quantised:
        """Unpack the tensors. Raises ModelError naming a tensor with impossible content."""

    def to_host(self) -> None:
        """Allocate all tensors but the matrix on the host. Their contents decide as which product it is prepared."""
        for end in list(self.places)[1:]:
            self.places[end] = torch.empty_like(self.places[end], device="cpu")

    def ignored(self) -> frozenset[str]:
        """The name suffixes of tensors that have no effect."""
        return frozenset()

    def empty(self, *shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=self.device)

    def scale(self, end: str, *shape: int) -> Tensor:
        """An empty tensor for scales, in the checkpoint's dtype, so that they keep all digits."""
        stored = self.headers.get(end)
        return self.empty(*shape, dtype=torch.float32 if stored is None else _FLOATS.get(stored.dtype, torch.float32))

    def finite(self, end: str) -> Tensor:
        """The scales with this suffix. Raises ModelError if some are not finite."""
        scales = self.places[end]
        if not bool(torch.isfinite(scales.float()).all()):
            raise ModelError(f"{self.name}.{end} has scales that are no finite numbers")
        return scales


def unpacked(packed: Tensor, bits: int, dim: int) -> Tensor:
    """Unpack the numbers of `bits` bits in int32 `packed`, lowest bits first, along `dim` of two. Returns uint8."""
    shifts = torch.arange(0, 32, bits, dtype=torch.int32, device=packed.device)
    apart = packed.unsqueeze(dim + 1) >> shifts.view(-1, 1) if dim == 0 else packed.unsqueeze(2) >> shifts
    flat: Tensor = (apart & (2**bits - 1)).to(torch.uint8).flatten(dim, dim + 1)
    return flat


class GptqMatrix(Stored):
    """The GPTQ format (arXiv 2210.17323) as AutoGPTQ and GPTQModel write it.

    qweight   int32 [inputs * bits / 32, outputs], the first input in the lowest bits
    qzeros    int32 [groups, outputs * bits / 32], packed in the same way along outputs; the first version stores them
              less one, with wrap-around
    scales    [groups, outputs]
    g_idx     int32 [inputs]: the group of each input; with desc_act inputs are grouped by importance
    """

    def empty_tensors(self) -> dict[str, Tensor]:
        bits, groups = self.scheme.bits, self.scheme.groups(self.inputs)
        each = 32 // bits
        if self.inputs % each or self.outputs % each:
            raise ModelError(f"{self.name} is [{self.outputs}, {self.inputs}]: GPTQ packs multiples of {each}")
        places = {
            "qweight": self.empty(self.inputs // each, self.outputs),
            "qzeros": self.empty(groups, self.outputs // each),
            "scales": self.scale("scales", groups, self.outputs),
        }
        # Early checkpoints leave it out if inputs are in order.
        if "g_idx" in self.headers or self.scheme.shuffled:
            places["g_idx"] = self.empty(self.inputs)
        return places

    def read(self) -> Matrix:
        bits, places = self.scheme.bits, self.places
        scales = self.finite("scales")
        zeros = unpacked(places["qzeros"], bits, 1)
        if self.scheme.one_less:
            zeros = (zeros + 1) & (2**bits - 1)
        q = unpacked(places["qweight"], bits, 0).T
        order = None
        if "g_idx" in places:
            order = grouped_order(f"{self.name}.g_idx", places["g_idx"], len(scales))
        if order is not None:
            q = q.index_select(1, order.to(q.device))
        return Matrix(bits, q.contiguous(), scales, beside_middle(zeros, bits), order)


def beside_middle(zeros: Tensor, bits: int) -> Tensor | None:
    """The zero points, or None if all of them are the middle, so that kernels need not read them."""
    return None if bool((zeros == torch.tensor(2 ** (bits - 1), device=zeros.device)).all()) else zeros.contiguous()


class AwqMatrix(Stored):
    """The AWQ format (arXiv 2306.00978) as AutoAWQ's "gemm" writes it: inputs are in order, outputs interleaved.

    qweight   int32 [inputs, outputs / 8]: 8 outputs in each word, in the order 0 2 4 6 1 3 5 7 from the lowest bits up
    qzeros    int32 [groups, outputs / 8], in the same order
    scales    [groups, outputs]
    """

    def empty_tensors(self) -> dict[str, Tensor]:
        groups = self.scheme.groups(self.inputs)
        if self.outputs % 8:
            raise ModelError(f"{self.name} has {self.outputs} outputs: AWQ packs multiples of 8")
        return {
            "qweight": self.empty(self.inputs, self.outputs // 8),
            "qzeros": self.empty(groups, self.outputs // 8),
            "scales": self.scale("scales", groups, self.outputs),
        }

    def read(self) -> Matrix:
        zeros = _in_order(self.places["qzeros"])
        q = _in_order(self.places["qweight"]).T.contiguous()
        return Matrix(4, q, self.finite("scales"), beside_middle(zeros, 4), None)


def _in_order(packed: Tensor) -> Tensor:
    places = torch.tensor(_PLACES, device=packed.device)
    return unpacked(packed, 4, 1).view(len(packed), -1, 8).index_select(2, places).flatten(1)


class PackedMatrix(Stored):
    """The compressed-tensors format "pack-quantized" (4 and 8 bits).

    weight_packed      int32 [outputs, inputs * bits / 32], the first number in the lowest bits, zero in the middle
    weight_scale       [outputs, groups]
    weight_zero_point  int32 [outputs * bits / 32, groups], packed along outputs; present if the scheme is not symmetric
    weight_g_idx       int32 [inputs]: the group of each input; -1 everywhere means none
    weight_shape       [2]: outputs and inputs
    """

    def empty_tensors(self) -> dict[str, Tensor]:
        each, groups = 32 // self.scheme.bits, self.scheme.groups(self.inputs)
        shape = self.headers.get("weight_shape")
        places = {
            "weight_packed": self.empty(self.outputs, -(-self.inputs // each)),
            "weight_scale": self.scale("weight_scale", self.outputs, groups),
            "weight_shape": self.empty(2, dtype=torch.int32 if shape and shape.dtype == "I32" else torch.int64),
        }
        if self.scheme.zeros:
            places["weight_zero_point"] = self.empty(-(-self.outputs // each), groups)
        if "weight_g_idx" in self.headers or self.scheme.shuffled:
            places["weight_g_idx"] = self.empty(self.inputs)
        return places

    def read(self) -> Matrix:
        bits, places = self.scheme.bits, self.places
        shape = places["weight_shape"].tolist()
        if shape != [self.outputs, self.inputs]:
            raise ModelError(
                f"{self.name}.weight_shape is {shape}; config.json asks for [{self.outputs}, {self.inputs}]"
            )
        scales = self.finite("weight_scale").T.contiguous()
        q = unpacked(places["weight_packed"], bits, 1)[:, : self.inputs]
        zeros = None
        if self.scheme.zeros:
            zeros = beside_middle(unpacked(places["weight_zero_point"], bits, 0)[: self.outputs].T, bits)
        order, index = None, places.get("weight_g_idx")
        if index is not None and not bool((index == -1).all()):
            order = grouped_order(f"{self.name}.weight_g_idx", index, len(scales))
        if order is not None:
            q = q.index_select(1, order.to(q.device))
        return Matrix(bits, q.contiguous(), scales, zeros, order)


class Int8Matrix(Stored):
    """The compressed-tensors format "int-quantized" (8 bits): int8 `weight` [outputs, inputs] and weight_scale, without
    zero points.
    """

    def empty_tensors(self) -> dict[str, Tensor]:
        groups = self.scheme.groups(self.inputs)
        return {
            "weight": self.empty(self.outputs, self.inputs, dtype=torch.int8),
            "weight_scale": self.scale("weight_scale", self.outputs, groups),
        }

    def ignored(self) -> frozenset[str]:
        # Scales of activations. Activations are not quantised here, or with scales of their own.
        return frozenset({"input_scale", "input_zero_point"})

    def read(self) -> Matrix:
        scales = self.finite("weight_scale").T.contiguous()
        q = (self.places["weight"].to(torch.int16) + 128).to(torch.uint8)
        return Matrix(8, q, scales, None, None)


@dataclass(frozen=True, slots=True)
class Fp8Matrix(Quantised):
    values: Tensor
    """e4m3 [outputs, inputs]."""
    scales: Tensor
    """fp32 [outputs, 1], or [outputs, inputs / block] with one scale for `block` inputs."""
    block: int

    def prepare(self, kernels: Kernels, bias: Tensor | None) -> PreparedLinear:
        if self.scales.shape[1] == 1:
            return kernels.prepare_fp8(self.values, self.scales, bias)
        return kernels.prepare_linear(self.dequantise().to(kernels.weight_dtype), bias)

    def dequantise(self) -> Tensor:
        wide = self.scales.repeat_interleave(self.block, 1)[:, : self.values.shape[1]]
        return self.values.float() * wide

    def table(self) -> None:
        return None

    def narrowed(self, outputs: range, inputs: range) -> Fp8Matrix:
        rows, columns = slice(outputs.start, outputs.stop), slice(inputs.start, inputs.stop)
        scales, block = self.scales[rows], self.block
        if len(inputs) < self.values.shape[1]:
            if scales.shape[1] > 1:
                scales, block = scales.repeat_interleave(block, 1)[:, columns], 1
            else:
                block = len(inputs)
        return Fp8Matrix(self.values[rows, columns].clone(), scales.clone(), block)

    def stacked_on(self, others: Sequence[Quantised]) -> Fp8Matrix | None:
        alike = [other for other in others if isinstance(other, Fp8Matrix) and other.block == self.block]
        if len(alike) < len(others):
            return None
        all_ = [self, *alike]
        # Joined as bytes, because not every device can join 8-bit floats.
        values = torch.cat([matrix.values.view(torch.uint8) for matrix in all_]).view(self.values.dtype)
        return Fp8Matrix(values, torch.cat([matrix.scales for matrix in all_]), self.block)


class Fp8Stored(Stored):
    """Weights in 8-bit floats (e4m3): compressed-tensors' "float-quantized" and the "fp8" method.

    weight             e4m3 [outputs, inputs]
    weight_scale       one number, or [outputs] or [outputs, 1]; a weight is the stored number times its scale
    weight_scale_inv   [outputs / block, inputs / block], rounded up: also factors, despite the name, one for each block
    """

    def empty_tensors(self) -> dict[str, Tensor]:
        values = self.empty(self.outputs, self.inputs, dtype=torch.float8_e4m3fn)
        if self.scheme.block is not None:
            outputs, inputs = self.scheme.block
            end = "weight_scale_inv" if "weight_scale_inv" in self.headers else "weight_scale"
            return {"weight": values, end: self.scale(end, -(-self.outputs // outputs), -(-self.inputs // inputs))}
        stored = self.headers.get("weight_scale")
        shape = (self.outputs, 1) if stored is None else stored.shape
        if shape not in ((), (1,), (self.outputs,), (self.outputs, 1)):
            raise ModelError(
                f"{self.name}.weight_scale has shape {list(shape)}; one number, or one for each of the {self.outputs} "
                "outputs, is expected"
            )
        return {"weight": values, "weight_scale": self.scale("weight_scale", *shape)}

    def ignored(self) -> frozenset[str]:
        # Activations get one scale for each row, which is finer than the checkpoint's single one.
        return frozenset({"input_scale"})

    def read(self) -> Fp8Matrix:
        (end,) = (end for end in self.places if end != "weight")
        scales, block = self.finite(end).float(), self.inputs
        if self.scheme.block is None:
            scales = scales.reshape(-1, 1).expand(self.outputs, 1)
        else:
            scales = scales.repeat_interleave(self.scheme.block[0], 0)[: self.outputs]
            block = self.scheme.block[1]
        return Fp8Matrix(self.places["weight"], scales.contiguous(), block)


@dataclass(frozen=True, slots=True)
class Pruned(Quantised):
    """A matrix that is not quantised, and of which two of four adjacent inputs are zero."""

    values: Tensor
    """[outputs, inputs], floating."""

    def prepare(self, kernels: Kernels, bias: Tensor | None) -> PreparedLinear:
        return kernels.prepare_pruned(self.values.to(kernels.weight_dtype), bias)

    def dequantise(self) -> Tensor:
        return self.values.float()

    def table(self) -> None:
        return None

    def narrowed(self, outputs: range, inputs: range) -> Pruned:
        return Pruned(self.values[outputs.start : outputs.stop, inputs.start : inputs.stop].clone())

    def stacked_on(self, others: Sequence[Quantised]) -> Pruned | None:
        alike = [other for other in others if isinstance(other, Pruned) and other.values.dtype == self.values.dtype]
        return (
            None if len(alike) < len(others) else Pruned(torch.cat([self.values, *(other.values for other in alike)]))
        )


class DensePruned(Stored):
    """A pruned matrix as it is, with its zeros: floating `weight` [outputs, inputs]."""

    def empty_tensors(self) -> dict[str, Tensor]:
        return {"weight": self.empty(self.outputs, self.inputs, dtype=_FLOATS[self.headers["weight"].dtype])}

    def read(self) -> Pruned:
        return Pruned(self.places["weight"])


class BitmaskPruned(Stored):
    """The compressed-tensors format "sparse-24-bitmask", of plain and of quantised matrices.

    compressed   [outputs, inputs / 2]: the values that are kept, row after row; floating, int8 or e4m3
    bitmask      uint8 [outputs, inputs / 8]: where they are, the first input in the lowest bit; two of each four
    shape        [2]: outputs and inputs

    A quantised matrix has its scales beside these, as without a mask.
    """

    def empty_tensors(self) -> dict[str, Tensor]:
        if self.inputs % 8:
            raise ModelError(f"{self.name} has {self.inputs} inputs: a bitmask has multiples of 8")
        dtype = {"I8": torch.int8, "F8_E4M3": torch.float8_e4m3fn, **_FLOATS}.get(self.headers["compressed"].dtype)
        shape = self.headers.get("shape")
        places = {
            "compressed": self.empty(self.outputs, self.inputs // 2, dtype=dtype or torch.float32),
            "bitmask": self.empty(self.outputs, self.inputs // 8, dtype=torch.uint8),
            "shape": self.empty(2, dtype=torch.int32 if shape and shape.dtype == "I32" else torch.int64),
        }
        if (whole := self._whole("meta")) is not None:
            scales = whole.places.keys() - {"weight"}
            places |= {end: torch.empty_like(whole.places[end], device=self.device) for end in scales}
        return places

    def _whole(self, device: str | torch.device) -> Stored | None:
        """The matrix as it would be stored with its zeros, if it is quantised."""
        if self.scheme.form == "pruned":
            return None
        return _FORMS[self.scheme.form](
            self.name, self.outputs, self.inputs, self.scheme, self.headers, torch.device(device)
        )

    def ignored(self) -> frozenset[str]:
        whole = self._whole("meta")
        return frozenset() if whole is None else whole.ignored()

    def read(self) -> Quantised:
        places = self.places
        if (shape := places["shape"].tolist()) != [self.outputs, self.inputs]:
            raise ModelError(f"{self.name}.shape is {shape}; config.json asks for [{self.outputs}, {self.inputs}]")
        compressed = places["compressed"]
        kept = unpacked_bits(places["bitmask"]).to(compressed.device)
        if not kept.is_meta and not bool((kept.view(self.outputs, -1, 4).sum(-1) == 2).all()):
            raise ModelError(f"{self.name}.bitmask does not keep two of each four inputs")
        # 8-bit floats are scattered as bytes, for which every device has it.
        numbers = compressed.view(torch.uint8) if compressed.dtype == torch.float8_e4m3fn else compressed
        dense = numbers.new_zeros(self.outputs, self.inputs).masked_scatter_(kept, numbers).view(compressed.dtype)
        whole = self._whole("meta")
        if whole is None:
            return Pruned(dense)
        whole.places = {end: places.get(end, dense) for end in whole.places}
        return whole.read()


def unpacked_bits(packed: Tensor) -> Tensor:
    """The bits of uint8 `packed`, [rows, bytes], the lowest of each byte first: bool [rows, 8 * bytes]."""
    shifts = torch.arange(8, dtype=torch.uint8, device=packed.device)
    return ((packed.unsqueeze(2) >> shifts) & 1).bool().flatten(1)


class GgufMatrix(Stored):
    """A matrix of a GGUF file: rows of blocks (gguf.py), uint8 [outputs, bytes].

    All types keep their integers. Scales and minima of the K types are products of two numbers, which are rounded to
    fp16: by at most a 2048th. Those of other types are in fp16 in the file.
    """

    #: The numbers that are unpacked at one time.
    _AT_ONCE = 1 << 22

    def empty_tensors(self) -> dict[str, Tensor]:
        self._kind = self.headers["weight"].dtype
        numbers, size = BLOCKS[self._kind]
        if self.inputs % numbers:
            raise ModelError(f"{self.name} has {self.inputs} inputs; {self._kind} packs multiples of {numbers}")
        return {"weight": self.empty(self.outputs, self.inputs // numbers * size, dtype=torch.uint8)}

    def read(self) -> Matrix:
        rows = self.places["weight"]
        parts = [self._read(part) for part in rows.split(max(1, self._AT_ONCE // self.inputs))]  # type: ignore[no-untyped-call]
        q, scales, minima = (
            None if each[0] is None else torch.cat([part for part in each if part is not None])
            for each in zip(*parts, strict=True)
        )
        for numbers, label in ((scales, "scales"), (minima, "minima")):
            if numbers is not None and not numbers.is_meta and not bool(torch.isfinite(numbers).all()):
                raise ModelError(f"{self.name}.weight has {label} that are no finite numbers")
        if q is None or scales is None:
            raise ModelError(f"{self.name}.weight has no rows")
        minima = None if minima is None else minima.T.contiguous()
        return Matrix(self._bits, q, scales.T.contiguous(), None, None, minima)

    @property
    def _bits(self) -> int:
        return 4 if KEPT[self._kind].bits == 4 else 8

    def _read(self, rows: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """q as Matrix has it, uint8 [rows, inputs], and scales and minima, [rows, groups]."""
        groups, kept = unpacked_blocks(self._kind, rows), KEPT[self._kind]
        # Scales of Q8_K are in fp32 in the file.
        dtype = torch.float16 if kept.scale_bits == 16 else torch.float32
        minima = None if groups.minima is None else groups.minima.to(dtype)
        middle = 128 if self._bits == 8 else 0 if kept.minima else MIDDLE
        return (groups.q + middle).to(torch.uint8).flatten(1), groups.scales.to(dtype), minima


class NarrowedStored(Stored):
    """A part of a stored matrix. The file's tensors are read whole: they are packed in too many ways to be cut."""

    def __init__(self, whole: Stored, outputs: range, inputs: range) -> None:
        self._whole, self._outputs, self._inputs = whole, outputs, inputs
        super().__init__(whole.name, len(outputs), len(inputs), whole.scheme, whole.headers, whole.device)

    def empty_tensors(self) -> dict[str, Tensor]:
        return self._whole.places

    def read(self) -> Quantised:
        try:
            return self._whole.read().narrowed(self._outputs, self._inputs)
        except ValueError as error:
            raise ModelError(f"{self.name} cannot be divided: {error}") from error

    def ignored(self) -> frozenset[str]:
        return self._whole.ignored()


_FORMS: Final[dict[Form, type[Stored]]] = {
    "gptq": GptqMatrix,
    "awq": AwqMatrix,
    "packed": PackedMatrix,
    "int8": Int8Matrix,
    "fp8": Fp8Stored,
    "gguf": GgufMatrix,
    "pruned": DensePruned,
}
#: Matrices that no sparsity is for, by the last part of their names. The embedding is looked up, and the rest are few.
_NOT_PRUNED: Final = ("embed_tokens", "lm_head")
#: Maps the tensor names that only quantised matrices have to the formats that use them.
_NAMES: Final[dict[str, tuple[Form, ...]]] = {"qweight": ("gptq", "awq"), "weight_packed": ("packed",)}
#: Maps formats whose tensor has the usual name "weight" to its dtype.
_DTYPES: Final[dict[Form, str]] = {"int8": "I8", "fp8": "F8_E4M3"}


def stored_as(
    scheme: Scheme,
    name: str,
    outputs: int,
    inputs: int,
    headers: Mapping[str, StoredTensor],
    device: torch.device,
) -> Stored | None:
    """The stored form of the matrix `name`. None if it is not quantised or is absent.

    `headers`: the matrix's tensors by their name suffixes. They decide, because a checkpoint need not quantise all
    of its matrices and has several ways to say which. Raises ModelError if they have another format than `scheme`, or a
    shape that it cannot have.
    """
    for end, forms in _NAMES.items():
        if end in headers and scheme.form not in forms:
            raise ModelError(
                f"{name}.{end} is of another form than config.json's quantization_config says, {scheme.form}"
            )
    if scheme.bitmask and "bitmask" in headers:
        return BitmaskPruned(name, outputs, inputs, scheme, headers, device)
    if scheme.form == "pruned":
        plain = not scheme.bitmask and "weight" in headers and headers["weight"].dtype in _FLOATS
        quantised = plain and name.rpartition(".")[2] not in _NOT_PRUNED and ".experts." not in name
    elif scheme.form == "gguf":
        quantised = "weight" in headers and headers["weight"].dtype in BLOCKS
    elif scheme.form in _DTYPES:
        quantised = "weight" in headers and headers["weight"].dtype == _DTYPES[scheme.form]
    else:
        quantised = any(end in headers for end, forms in _NAMES.items() if scheme.form in forms)
    return _FORMS[scheme.form](name, outputs, inputs, scheme, headers, device) if quantised else None
