"""Builds the native CPU kernels (engine/kernels/native); everything else of the package is in pyproject.toml.

One shared library for each instruction set, loaded by ctypes: nothing of Python or torch is compiled in. Without a
compiler, or on another processor, the package installs all the same, and the engine runs on torch's kernels. pip shows
nothing of a build that ends well: the reason why a library is missing is noted in a file in its place, which the engine
reads when it starts, `make` prints and a test fails on.
"""

import copy
import platform
import shutil
import subprocess
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

NATIVE = Path("engine/kernels/native")
COMMON = ["-std=c++17", "-O3", "-g0", "-pthread", "-fvisibility=hidden", "-Wno-psabi"]
AVX2 = ["-mavx2", "-mfma", "-mf16c"]
AVX512 = ["-DLANES=16", *AVX2, *(f"-mavx512{part}" for part in ("f", "bw", "vl", "dq"))]
BF16 = ["-mavx512bf16", "-mavx512vnni"]
BUILDS = {
    "avx2": ["-DLANES=8", *AVX2],
    "avx512": AVX512,
    "avx512bf16": [*AVX512, *BF16],
    "avx512amx": [*AVX512, *BF16, "-DPENSTOCK_TILES"],  # only the assembler has to know AMX
}


class BuildLibraries(build_ext):
    def finalize_options(self) -> None:
        super().finalize_options()
        self.parallel = self.parallel or True  # one process of the compiler for each library

    def build_extension(self, ext: Extension) -> None:
        # All are of one source: in one folder, each compiler's object file would be overwritten by the next one's.
        own = copy.copy(self)
        own.build_temp = str(Path(self.build_temp) / ext.name)
        built = Path(self.build_lib, self.get_ext_filename(ext.name))
        for stale in (built, built.with_suffix(".txt")):
            stale.unlink(missing_ok=True)
        try:
            build_ext.build_extension(own, ext)
        except Exception as error:
            built.parent.mkdir(parents=True, exist_ok=True)
            built.with_suffix(".txt").write_text(self.reason(ext, error))
            raise

    def reason(self, ext: Extension, error: Exception) -> str:
        """One line: the compiler's first error, where there is a compiler and it has one."""
        compiler = getattr(self.compiler, "compiler_so_cxx", self.compiler.compiler_so)
        command = [*compiler, *ext.extra_compile_args, "-fsyntax-only", *ext.sources]
        try:
            ran = subprocess.run(command, capture_output=True, text=True, check=False)
        except OSError:
            return f"there is no C++ compiler ({compiler[0]})"
        return next((line for line in ran.stderr.splitlines() if "error" in line), str(error))

    def copy_extensions_to_source(self) -> None:
        """Libraries or the reasons why they are missing, instead of what an earlier install has left."""
        for ext in self.extensions:
            built, own = (Path(root, self.get_ext_filename(ext.name)) for root in (self.build_lib, "."))
            for suffix in (".so", ".txt"):
                own.with_suffix(suffix).unlink(missing_ok=True)
                if built.with_suffix(suffix).exists():
                    shutil.copy(built.with_suffix(suffix), own.with_suffix(suffix))

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
