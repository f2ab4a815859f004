"""The builds that can be tried here: the CPU's own, and those for other CPUs, emulated in AVX2's instructions."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

import engine.kernels.native
from engine.kernels.native import Native, load_library
from engine.kernels.native.library import Library

SOURCE = Path(engine.kernels.native.__file__).parent / "penstock.cpp"

#: The parts of a build with AMX that use its tiles. They compile in seconds.
TILES = Path(__file__).parent / "tiles.cpp"

#: (dtype of the weights, threads, other settings) -> a kernel set
Make = Callable[..., Native]


def compiled(factory: pytest.TempPathFactory, name: str, *flags: str, source: Path = SOURCE) -> Path:
    """A library for vectors of 16, in AVX2's instructions: any compiler cuts them in two. Compiled once for all
    processes that test, because that may take longer than the tests."""
    compiler = shutil.which("g++") or shutil.which("clang++")
    if compiler is None or load_library() is None:
        pytest.skip("needs a C++ compiler and AVX2")
    own = factory.getbasetemp()
    folder = own.parent if "PYTEST_XDIST_WORKER" in os.environ else own
    path, part = folder / f"{name}.so", folder / f"{name}.part"
    every = [
        "-std=c++17",
        "-Og",
        "-mavx2",
        "-mfma",
        "-mf16c",
        "-DLANES=16",
        "-shared",
        "-fPIC",
        "-pthread",
        "-Wno-psabi",
        *flags,
    ]
    with (folder / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.exists():
            own_headers = f"-I{SOURCE.parent}"
            subprocess.run([compiler, *every, own_headers, str(source), "-o", str(part)], check=True, timeout=840)
            part.rename(path)
    return path


@pytest.fixture(scope="session")
def wide_library(tmp_path_factory: pytest.TempPathFactory) -> Library:
    """All of the logic for AVX-512 but for the choice of instructions."""
    return Library(compiled(tmp_path_factory, "wide"), "wide")


@pytest.fixture(scope="session")
def dots_library(tmp_path_factory: pytest.TempPathFactory) -> Library:
    """With products of pairs of bf16, which are emulated: the packing and rounding of CPUs that have them."""
    return Library(compiled(tmp_path_factory, "dots", "-DPENSTOCK_EMULATED_DOTS"), "dots")


@pytest.fixture(scope="module", params=["emulated", "own"])
def tiles_build(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The functions of tiles.cpp, or more: with AMX's tiles emulated, and by the CPU itself."""
    if request.param == "emulated":
        return compiled(tmp_path_factory, "tile_parts", "-DPENSTOCK_EMULATED_TILES", source=TILES)
    built = load_library()
    if built is None or built.isa != "avx512amx":
        pytest.skip("AMX's kernels are not built for this CPU")
    return SOURCE.parent / "_avx512amx.so"


@pytest.fixture(scope="session")
def tiles_library(tmp_path_factory: pytest.TempPathFactory) -> Library:
    """With AMX's tiles, which are emulated."""
    return Library(compiled(tmp_path_factory, "tiles", "-DPENSTOCK_EMULATED_TILES"), "tiles")


#: Compiling takes a quarter of a minute, and several minutes where the machine has much else to do.
PATIENT = (pytest.mark.exhaustive, pytest.mark.slow, pytest.mark.timeout(900))


@pytest.fixture(params=["own", *(pytest.param(name, marks=PATIENT) for name in ("wide", "dots", "tiles"))])
def make(request: pytest.FixtureRequest) -> Make:
    if request.param == "own":
        built = load_library()
        if built is None:
            pytest.skip("native kernels are not built for this CPU")
    else:
        built = request.getfixturevalue(f"{request.param}_library")
    return lambda dtype, threads, **settings: Native(dtype, built, threads, **settings)
