"""Compiles Triton's C modules ahead: its driver interface and, up to Triton 3.6, a launcher for each signature.

At run time each needs a C compiler, Python's headers and some tenths of a second, unless it is in the cache. This
module puts them into the cache on machines without a GPU or driver. It links them against an empty library with the
driver's name, because their symbols are looked up only when they are loaded.
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sysconfig
import tempfile
from pathlib import Path
from typing import Any, Final

from triton.backends.nvidia import driver as nvidia
from triton.runtime import build
from triton.runtime.cache import get_cache_manager

from engine.errors import EngineError

_SUFFIX: Final = sysconfig.get_config_var("EXT_SUFFIX")
_DRIVER: Final = "libcuda.so.1"


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
