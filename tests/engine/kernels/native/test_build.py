"""An install leaves native libraries wherever they can be built, else the reason why not."""

from __future__ import annotations

import ctypes
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from engine.kernels.native import library, load_library

ROOT = Path(library.__file__).parents[3]
NATIVE = Path("engine/kernels/native")
X86_64 = platform.machine().lower() in ("x86_64", "amd64")
COMPILER = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")


@pytest.mark.skipif(COMPILER is None or not X86_64, reason="needs a C++ compiler and x86-64")
def test_where_there_is_a_compiler_every_build_is_there_and_the_best_is_taken(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Else all tests of native kernels would be skipped, and nothing would fail."""
    notes = {path.name: path.read_text() for path in (ROOT / NATIVE).glob("_*.txt")}
    assert not notes
    assert all((ROOT / NATIVE / f"_{isa}.so").is_file() for isa in library._BUILDS)
    load_library.cache_clear()
    found = load_library()
    running = [isa for isa, runs in library._BUILDS.items() if runs()]
    allowed = [isa for isa in running if not ctypes.CDLL(str(ROOT / NATIVE / f"_{isa}.so")).penstock_refused()]
    assert not caplog.records or found is None or allowed != running
    assert (found and found.isa) == next(iter(allowed), None)


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """This project's setup.py, with a library of one function."""
    (tmp_path / NATIVE).mkdir(parents=True)
    shutil.copy(ROOT / "setup.py", tmp_path)
    (tmp_path / "pyproject.toml").write_text('[project]\nname = "built"\nversion = "0"\n')
    return tmp_path


def build(project: Path, source: str, **environment: str) -> None:
    (project / NATIVE / "penstock.cpp").write_text(source)
    command = [sys.executable, "setup.py", "-q", "build_ext", "--inplace", "--force"]
    subprocess.run(command, cwd=project, env=os.environ | environment, check=True, capture_output=True, timeout=240)


def left(project: Path) -> set[str]:
    return {path.name for path in (project / NATIVE).glob("_*")}


@pytest.mark.skipif(not X86_64, reason="nothing is built on another CPU")
def test_without_a_compiler_it_installs_and_the_engine_says_why(
    project: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    build(project, "", CC="/no/such/cc", CXX="/no/such/cxx")
    assert left(project) == {f"_{isa}.txt" for isa in library._BUILDS}
    monkeypatch.setattr(library, "_FOLDER", project / NATIVE)
    monkeypatch.setattr(library, "_BUILDS", {"avx2": lambda: True})
    load_library.cache_clear()
    try:
        assert load_library() is None
    finally:
        load_library.cache_clear()
    assert "_avx2.so was not built: there is no C++ compiler (/no/such/c" in caplog.text


@pytest.mark.skipif(COMPILER is None or not X86_64, reason="needs a C++ compiler and x86-64")
def test_a_source_that_fails_leaves_the_compilers_error_and_no_older_library(project: Path) -> None:
    build(project, 'extern "C" int penstock_version() { return 1; }\n')
    assert left(project) == {f"_{isa}.so" for isa in library._BUILDS}
    build(project, "#error not today\n")
    assert left(project) == {f"_{isa}.txt" for isa in library._BUILDS}
    assert "error: #error not today" in (project / NATIVE / "_avx2.txt").read_text()
    build(project, 'extern "C" int penstock_version() { return 1; }\n')
    assert left(project) == {f"_{isa}.so" for isa in library._BUILDS}
