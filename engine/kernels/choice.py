"""The choice of a kernel set: one table of what each set can do, and `select`, which picks one or refuses."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING, Final

import torch

from engine.errors import EngineError, ErrorText, FieldName
from engine.kernels.fallback import Cpu, Sdpa, computes_natively
from engine.kernels.fp8 import CAPABILITY
from engine.kernels.native import Native, load_library
from engine.kernels.reference import Ragged, Reference

if TYPE_CHECKING:
    from engine.kernels.gpu import Gpu


@dataclass(frozen=True, slots=True)
class Able:
    """A kernel set's abilities beside computing with the weights' dtype and keeping keys and values in it."""

    device: str | None = None
    """The type of the devices that it runs on; None is any."""
    deterministic: bool = False
    """Whether it can make a row depend, to the bit, on nothing but the row."""
    narrow_kv: bool = False
    """Whether its KV cache may have 8 bits."""
    both: bool = False
    """Whether it has the two above at once."""
    fp8: bool = False
    """Whether it multiplies 8-bit floats."""


#: The sets by their names in EngineConfig.
SETS: Final = {
    "reference": Able(),
    "ragged": Able(),
    "sdpa": Able(),
    "cpu": Able("cpu"),
    "native": Able("cpu", deterministic=True, narrow_kv=True, both=True),
    "triton": Able("cuda", deterministic=True, narrow_kv=True, fp8=True),
}
#: The sets in plain torch.
_TORCH: Final[dict[str, type[Reference]]] = {kernels.name: kernels for kernels in (Reference, Ragged, Sdpa, Cpu)}


def select(
    device: torch.device,
    dtype: torch.dtype,
    name: str = "auto",
    quantization: str = "none",
    deterministic: bool = False,
    kv_cache_dtype: str = "auto",
) -> Reference:
    """Pick the kernel set for weights of `dtype` on `device`: the named one, or the device's default.

    If a CPU only emulates `dtype`, weights are rounded to it, but held and computed in fp32. That was measured 5 to 8
    times as fast at 8 rows and more, for twice the memory. Raises EngineError if no set has this combination of
    `device`, `dtype`, `name`, `quantization` ("none" or "fp8"), `deterministic` and `kv_cache_dtype`.
    """
    chosen = _default(device) if name == "auto" else name
    if quantization == "fp8":
        _check_fp8(device, dtype, chosen)
    _check(device, chosen, deterministic, kv_cache_dtype)
    if chosen == "native":
        return _native(dtype, deterministic, kv_cache_dtype)
    if chosen == "triton":
        return _triton(device, dtype, quantization == "fp8", deterministic, kv_cache_dtype)
    native = device.type != "cpu" or computes_natively(dtype)
    return _TORCH[chosen](dtype if native else torch.float32)


def _default(device: torch.device) -> str:
    if device.type == "cpu":
        return "cpu" if load_library() is None else "native"
    return "triton" if _has_triton() else "sdpa"


def _check(device: torch.device, name: str, deterministic: bool, kv_cache_dtype: str) -> None:
    """Raises EngineError if the set cannot do what is asked."""
    able = SETS[name]
    if able.device == "cpu" and device.type != "cpu":
        raise EngineError(
            ErrorText.of("{kernels}={} are for CPUs, and the device is {}; use 'auto'", repr(name), device.type)
        )
    narrow = kv_cache_dtype != "auto"
    if narrow and not able.narrow_kv:
        raise _lacking(ErrorText.of("{kv_cache_dtype}={}", repr(kv_cache_dtype)), device, name)
    if deterministic and not able.deterministic:
        raise _lacking(FieldName("deterministic"), device, name)
    if narrow and deterministic and not able.both:
        raise narrow_and_deterministic(kv_cache_dtype)


def narrow_and_deterministic(kv_cache_dtype: str) -> EngineError:
    """The error for a KV cache of 8 bits with deterministic mode where no kernel set has both."""
    return EngineError(
        ErrorText.of("{kv_cache_dtype}={} with {deterministic} is for CPUs; use one of the two", repr(kv_cache_dtype))
    )


def _lacking(setting: ErrorText | FieldName, device: torch.device, name: str) -> EngineError:
    unbuilt = device.type == "cpu" and load_library() is None
    return EngineError(
        ErrorText.of(
            "{} needs native kernels on a CPU, and {kernels}='triton' on a CUDA device, and on {} they are {}; {}",
            setting,
            device.type,
            repr(name),
            "install penstock where a C++ compiler is" if unbuilt else ErrorText.of("use {kernels}='auto'"),
        )
    )


def _check_fp8(device: torch.device, dtype: torch.dtype, name: str) -> None:
    """Raises EngineError if weights cannot be quantised to 8-bit floats."""
    if device.type != "cuda":
        raise EngineError(
            ErrorText.of("{quantization}='fp8' needs a CUDA device, and the device is {}; use 'none'", device.type)
        )
    capability = torch.cuda.get_device_capability(device)
    if capability < CAPABILITY:
        raise EngineError(
            ErrorText.of("{quantization}='fp8' needs {}, and this one has {}.{}; use 'none'", _ada(), *capability)
        )
    if dtype != torch.bfloat16:
        raise EngineError(
            ErrorText.of(
                "{quantization}='fp8' computes in bfloat16, and {dtype} is {}; use {dtype}='bfloat16'",
                str(dtype).removeprefix("torch."),
            )
        )
    if not SETS[name].fp8:
        raise EngineError(
            ErrorText.of("{quantization}='fp8' goes with {kernels}='triton', not with {}; use 'auto'", repr(name))
        )


def _ada() -> str:
    return f"a GPU of compute capability {CAPABILITY[0]}.{CAPABILITY[1]} or more (Ada, Hopper)"


def _native(dtype: torch.dtype, deterministic: bool, kv_cache_dtype: str) -> Native:
    built = load_library()
    if built is None:
        raise EngineError(
            ErrorText.of(
                "{kernels}='native' are not built for this CPU: install penstock where a C++ compiler is, or use 'auto'"
            )
        )
    return Native(dtype, built, deterministic=deterministic, kv_cache_dtype=kv_cache_dtype)


def _has_triton() -> bool:
    return find_spec("triton") is not None


def _triton(device: torch.device, dtype: torch.dtype, fp8: bool, deterministic: bool, kv_cache_dtype: str) -> Gpu:
    if not _has_triton():
        raise EngineError(
            ErrorText.of("{kernels}='triton' need triton, which is not installed: pip install 'penstock[gpu]'")
        )
    from engine.kernels.deterministic import DeterministicFp8Gpu, DeterministicGpu
    from engine.kernels.gpu import Fp8Gpu, Gpu, interpreted

    if device.type == "cpu" and not interpreted():
        raise EngineError(ErrorText.of("{kernels}='triton' are for CUDA devices, and the device is cpu; use 'auto'"))
    if kv_cache_dtype == "fp8" and device.type == "cuda" and torch.cuda.get_device_capability(device) < CAPABILITY:
        raise EngineError(ErrorText.of("{kv_cache_dtype}='fp8' needs {}; use 'int8'", _ada()))
    if deterministic:
        return DeterministicFp8Gpu(dtype) if fp8 else DeterministicGpu(dtype)
    return (Fp8Gpu if fp8 else Gpu)(dtype, kv_cache_dtype=kv_cache_dtype)
