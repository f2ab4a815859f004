"""Compiles kernels ahead of their first run, also for a GPU that this machine does not have.

    with compiling_for("sm_90", folder) as builds:
        rms_norm(meta_tensor, ...)                 # the wrapper that the model itself calls

The wrappers run as on a GPU, with tensors of the device `meta` and another driver, which pretends to be a GPU of that
architecture and runs nothing. So Triton itself specialises kernels, makes cache keys and writes the cache, and a later
run finds the same keys. This module neither lists kernels nor guesses their specialisations.

Triton's C modules are compiled ahead as well: its driver interface and, up to Triton 3.6, a launcher for each
signature. At run time each needs a C compiler, Python's headers and some tenths of a second, unless it is in the cache.
They are linked against an empty library with the driver's name, because their symbols are looked up only when they are
loaded.

Triton stores absolute paths in its cache, so the folder must have the same path where it is used.
"""

from __future__ import annotations

import hashlib
import itertools
import re
import shutil
import subprocess
import sysconfig
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia import driver as nvidia
from triton.runtime import build, driver
from triton.runtime.cache import get_cache_manager

from engine.errors import EngineError

#: The most shared memory of one block, in bytes, by compute capability (CUDA C++ Programming Guide, technical
#: specifications). For 12.0 and unknown ones, the least is assumed.
_SHARED: Final = {80: 166_912, 87: 166_912, 90: 232_448, 100: 232_448, 103: 232_448}
_LEAST_SHARED: Final = 101_376
#: The oldest supported compute capability, the first with tensor cores for bfloat16.
_OLDEST: Final = 80
#: Triton keeps compiled kernels by device number. Each target gets a new number that no GPU has.
_devices = itertools.count(1 << 20)
_SUFFIX: Final = sysconfig.get_config_var("EXT_SUFFIX")
_DRIVER: Final = "libcuda.so.1"


@dataclass(frozen=True, slots=True)
class Build:
    """One specialisation of a kernel."""

    kernel: str
    key: str
    """Its folder in the cache: Triton's hash of source, specialisation, options, target and version."""
    cached: bool
    """Whether it was in the cache already."""
    seconds: float
    """The time of compiling it."""
    binary: Path
    """The path of the cubin."""
    shared: int
    """The bytes of shared memory that one block takes."""
    warps: int


def target_of(arch: str) -> GPUTarget:
    """The target of an architecture as NVIDIA names it (`sm_90`). Raises EngineError."""
    named = re.fullmatch(r"sm_(\d{2,3})a?", arch)
    if named is None or int(named[1]) < _OLDEST:
        raise EngineError(f"{arch!r} is no architecture to compile for; they look like sm_90, from sm_{_OLDEST} on")
    return GPUTarget("cuda", int(named[1]), 32)


@contextmanager
def compiling_for(arch: str, cache: Path | None = None) -> Iterator[list[Build]]:
    """A context in which launched kernels are compiled for `arch` into `cache` (None: Triton's default) and not run.

    It yields a list that fills with one Build for each specialisation, in the order of their first launches. Raises
    EngineError for an invalid `arch`, triton.runtime.OutOfResources for a kernel that needs more shared memory than
    `arch` has, and the compiler's own errors. No other thread may run kernels meanwhile.
    """
    target, builds = target_of(arch), list[Build]()
    before = driver._active  # `active` itself would look for a GPU

    def listener(*, src: Any, metadata: Any, metadata_group: Any, times: Any, cache_hit: bool) -> None:
        binary = next(Path(path) for name, path in metadata_group.items() if name.endswith(".cubin"))
        seconds = 0.0 if cache_hit else times.total / 1e6
        build = Build(
            src.name, binary.parent.name, cache_hit, seconds, binary, metadata["shared"], metadata["num_warps"]
        )
        builds.append(build)

    with knobs.cache.scope(), knobs.compilation.scope():
        if cache is not None:
            cache.mkdir(parents=True, exist_ok=True)
            knobs.cache.dir = str(cache.resolve())
        knobs.compilation.listener = listener
        driver.set_active(_NoGpu(target))
        try:
            yield builds
        finally:
            driver._active = before


class _NoGpu:
    """A driver that has the methods Triton calls before a launch, without a GPU."""

    def __init__(self, target: GPUTarget) -> None:
        self._target, self._device = target, next(_devices)
        self.utils = _Utilities(_SHARED.get(target.arch, _LEAST_SHARED))
        self.launcher_cls: Callable[..., Any] = _Launcher
        build_utilities()

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> int:
        return self._device

    def get_current_stream(self, device: int) -> int:
        return 0


class _Utilities:
    def __init__(self, shared: int) -> None:
        self._shared = shared

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": self._shared}

    def load_binary(self, name: str, binary: bytes, shared: int, device: int) -> tuple[object, object, int, int, int]:
        """Returns (module, function, registers, spills, the most threads of a block)."""
        return name, name, 0, 0, 1024


class _Launcher:
    """A launcher that runs nothing. Triton makes one for each kernel, and its compiled code goes into the cache too."""

    def __init__(self, source: Any, metadata: Any) -> None:
        build_launcher(source, metadata)

    def __call__(self, *launch: object) -> None:
        pass


def build_utilities() -> None:
    """Put Triton's driver interface into the cache. Raises EngineError without a C compiler or Python's headers."""
    _put("cuda_utils", (Path(nvidia.dirname) / "driver.c").read_text())


def build_launcher(source: Any, metadata: Any) -> None:
    """Put the launcher of a kernel (a Triton ASTSource and its metadata) into the cache, as `nvidia.CudaLauncher` does.

    From Triton 3.7 on this does nothing: one launcher, part of the driver interface, serves all kernels. Raises
    EngineError without a C compiler or Python's headers.
    """
    make = getattr(nvidia, "make_launcher", None)
    if make is not None:
        described = getattr(metadata, "tensordesc_meta", None)
        _put("__triton_launcher", make(dict(source.constants), dict(source.signature), described))


def _put(name: str, code: str) -> None:
    """Compile a module as `triton.runtime.build.compile_module_from_src` does, without loading it."""
    key = hashlib.sha256((code + build.platform_key()).encode()).hexdigest()
    cache = get_cache_manager(key)
    if cache.get_file(f"{name}{_SUFFIX}") is not None:
        return
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, f"{name}.c")
        source.write_text(code)
        try:
            libraries = _nameless(folder)
            built = build._build(name, str(source), folder, [libraries], nvidia.include_dirs, [_DRIVER], [])
        except (RuntimeError, subprocess.CalledProcessError) as error:  # there is no compiler, or it found no headers
            needed = "a compiler and Python's headers (Debian, Ubuntu: gcc python3-dev)"
            raise EngineError(f"Triton compiles its launchers in C, which takes {needed}: {error}") from error
        cache.put(Path(built).read_bytes(), f"{name}{_SUFFIX}", binary=True)


def _nameless(folder: str) -> str:
    """Put an empty library with the driver's name into a folder. Returns the folder."""
    source = Path(folder, "empty.c")
    source.write_text("")
    built = build._build("empty", str(source), folder, [], [], [], [f"-Wl,-soname,{_DRIVER}"])
    shutil.copyfile(built, Path(folder, _DRIVER))
    return folder
