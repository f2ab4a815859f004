"""Builds the native CPU kernels (engine/kernels/native); everything else of the package is in pyproject.toml.

One shared library for each instruction set, loaded by ctypes: nothing of Python or torch is compiled in. Without a
compiler, or on another processor, the package installs all the same, and the engine runs on torch's kernels.
"""

import copy
import platform
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

NATIVE = Path("engine/kernels/native")
COMMON = ["-std=c++17", "-O3", "-g0", "-pthread", "-fvisibility=hidden", "-Wno-psabi"]
AVX2 = ["-mavx2", "-mfma", "-mf16c"]
AVX512 = ["-DLANES=16", *AVX2, *(f"-mavx512{part}" for part in ("f", "bw", "vl", "dq"))]
BUILDS = {
    "avx2": ["-DLANES=8", *AVX2],
    "avx512": AVX512,
    "avx512bf16": [*AVX512, "-mavx512bf16"],
}


class BuildLibraries(build_ext):
    def finalize_options(self) -> None:
        super().finalize_options()
        self.parallel = self.parallel or True  # one process of the compiler for each library

    def build_extension(self, ext: Extension) -> None:
        # All are of one source: in one folder, each compiler's object file would be overwritten by the next one's.
        own = copy.copy(self)
        own.build_temp = str(Path(self.build_temp) / ext.name)
        build_ext.build_extension(own, ext)

    def get_ext_filename(self, fullname: str) -> str:
        # No tag of a Python version: it is not Python's to import.
        return f"{fullname.replace('.', '/')}.so"

    def get_export_symbols(self, ext: Extension) -> list[str]:
        return []


setup(
    cmdclass={"build_ext": BuildLibraries},
    ext_modules=[
        Extension(
            f"engine.kernels.native._{isa}",
            [str(NATIVE / "penstock.cpp")],
            depends=[str(path) for path in sorted(NATIVE.glob("*.h"))],
            extra_compile_args=[*COMMON, *flags],
            extra_link_args=["-pthread"],
            language="c++",
            optional=True,
        )
        for isa, flags in BUILDS.items()
        if platform.machine().lower() in ("x86_64", "amd64")
    ],
)
