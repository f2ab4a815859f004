"""Which build is taken, and what there is without one."""

from __future__ import annotations

import ctypes
import errno
import resource
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from engine import EngineError
from engine.kernels import select
from engine.kernels.native import Native, library, load_library
from engine.kernels.native.library import Library, Pool
from tests.engine.looping import until

CPU = torch.device("cpu")
FOLDER = Path(library.__file__).parent
BUILDS = [("avx2", 24, 0), ("avx512", 48, 0), ("avx512bf16", 48, 1), ("avx512amx", 48, 1)]
BUILT = pytest.mark.skipif(load_library() is None, reason="native kernels are not built for this CPU")


@pytest.fixture
def unbuilt(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """As installed without a compiler."""
    monkeypatch.setattr("engine.kernels.native.library._FOLDER", tmp_path)
    load_library.cache_clear()
    yield
    load_library.cache_clear()


@pytest.mark.usefixtures("unbuilt")
def test_without_a_build_torchs_kernels_are_taken_and_a_line_says_why(caplog: pytest.LogCaptureFixture) -> None:
    assert select(CPU, torch.bfloat16).name == "cpu"
    for option in ({"deterministic": True}, {"kv_cache_dtype": "int8"}):
        with pytest.raises(EngineError, match="install penstock where a C"):
            select(CPU, torch.bfloat16, **option)
    assert [record.getMessage() for record in caplog.records if "torch's are taken" in record.getMessage()]
    assert len(caplog.records) == 1


@BUILT
def test_threads_that_the_system_does_not_give_are_refused_and_those_it_gave_end() -> None:
    before, found = threads(), load_library()
    assert found is not None
    now = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (now + (256 << 20), hard))
    try:
        with pytest.raises(EngineError, match="does not start 999 more threads"):
            Pool(found, 1000)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
    # The system lists a thread for some time after it was waited for; `before` may have had such ones too.
    until(lambda: threads() <= before)


def threads() -> int:
    return len(list(Path("/proc/self/task").iterdir()))


@BUILT
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_with_a_build_native_kernels_are_taken(dtype: torch.dtype) -> None:
    for deterministic in (False, True):
        assert isinstance(select(CPU, dtype, deterministic=deterministic), Native)


@BUILT
@pytest.mark.parametrize(("isa", "columns", "rounds"), BUILDS)
def test_each_file_is_of_its_own_build(isa: str, columns: int, rounds: int) -> None:
    path = Path(library.__file__).parent / f"_{isa}.so"
    if not path.exists():
        pytest.skip("needs a C++ compiler that knows the instructions")
    found = ctypes.CDLL(str(path))
    assert (found.penstock_columns(), found.penstock_rounds()) == (columns, rounds)
    assert bool(found.penstock_paired()) == (isa == "avx512amx")


@BUILT
@pytest.mark.parametrize("head_dim", [8, 12])
def test_heads_that_torch_has_to_attend_to_are_refused_in_deterministic_mode_alone(head_dim: int) -> None:
    select(CPU, torch.float32, "native").prepare_attention(4, 2, head_dim, None)
    strict = select(CPU, torch.float32, "native", deterministic=True)
    if head_dim % 8 == 0:
        strict.prepare_attention(4, 2, head_dim, None)
        return
    with pytest.raises(EngineError, match="heads of 12"):
        strict.prepare_attention(4, 2, head_dim, None)


@pytest.mark.usefixtures("unbuilt")
def test_native_kernels_that_are_not_built_are_refused_by_name() -> None:
    with pytest.raises(EngineError, match="'native' are not built for this CPU"):
        select(CPU, torch.float32, "native")


def test_a_file_that_is_no_library_is_reported(tmp_path: Path) -> None:
    path = tmp_path / "_avx2.so"
    path.write_bytes(b"nothing")
    with pytest.raises(OSError, match=r"_avx2\.so"):
        Library(path, "avx2")


@BUILT
def test_a_truncated_file_is_reported_before_it_is_mapped(tmp_path: Path) -> None:
    own = load_library()
    assert own is not None
    path = tmp_path / "_avx2.so"
    whole = (FOLDER / f"_{own.isa}.so").read_bytes()
    for size in (0, 63, 64, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:size])
        with pytest.raises(OSError, match=r"_avx2\.so is cut off: build it again"):
            Library(path, "avx2")
    path.write_bytes(whole)
    assert Library(path, own.isa).columns == own.columns


def stub(folder: Path, refused: int) -> Path:
    """A library that can say two things of itself, and no more."""
    compiler = shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        pytest.skip("needs a C compiler")
    source, path = folder / "a.c", folder / "_avx2.so"
    says = {"version": library.VERSION, "refused": refused}
    source.write_text("".join(f"int penstock_{name}(void) {{ return {value}; }}\n" for name, value in says.items()))
    subprocess.run([compiler, "-shared", "-fPIC", source, "-o", path], check=True)
    return path


def test_a_library_without_a_function_is_reported(tmp_path: Path) -> None:
    with pytest.raises(OSError, match=r"_avx2\.so is not what it should be .*penstock_columns.*: build it again"):
        Library(stub(tmp_path, refused=0), "avx2")


def test_instructions_that_the_system_refuses_are_not_used(tmp_path: Path) -> None:
    with pytest.raises(OSError, match=r"not let this process use what .*_avx2\.so needs \(Operation not permitted\)"):
        Library(stub(tmp_path, refused=errno.EPERM), "avx2")


@BUILT
def test_a_build_that_cannot_be_used_leaves_the_next_best_and_a_line(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, unbuilt: None, tmp_path: Path
) -> None:
    (tmp_path / "_avx2.so").symlink_to(FOLDER / "_avx2.so")
    monkeypatch.setattr(library, "_BUILDS", {"avx512": lambda: True, "avx2": lambda: True})
    found = load_library()
    assert found is not None
    assert found.isa == "avx2"
    assert [record.getMessage() for record in caplog.records] == [
        f"native CPU kernels for avx2 are taken, there were faster ones: {tmp_path}/_avx512.so is missing: "
        "build it again"
    ]


@BUILT
def test_weights_and_keys_in_bf16_stay_so_and_are_computed_with_in_fp32() -> None:
    found = select(CPU, torch.bfloat16, "native")
    assert isinstance(found, Native)
    assert (found.compute_dtype, found.weight_dtype, found.cache_dtype) == (
        torch.float32,
        torch.bfloat16,
        torch.bfloat16,
    )
    assert found.name in {f"native-{isa}" for isa, _, _ in BUILDS}
    assert found.identity.startswith(found.name)
    assert select(CPU, torch.float16, "native").weight_dtype == torch.float32
