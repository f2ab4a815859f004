"""Fixtures for the engine's tests: one CPU thread, every device there is, a random model to load."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from engine import Engine, EngineConfig
from tests.engine.random_models import FAMILIES, write_model
from tests.exhaustive import few

if find_spec("triton") is not None and not torch.cuda.is_available():
    from tests.engine import interpreter  # noqa: F401 - mends Triton's, in which kernels run where there is no GPU

Load = Callable[..., Engine]

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("cuda") and not torch.cuda.is_available():
        pytest.skip("no CUDA device")


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> None:
    """Whatever the tests of another file, or folder, have left."""
    torch.set_num_threads(1)


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> torch.device:
    return torch.device(request.param)


@pytest.fixture(scope="session", params=DEVICES[-1:])
def where(request: pytest.FixtureRequest) -> torch.device:
    """The device that kernels run on: the GPU, or, without one, Triton's interpreter."""
    return torch.device(request.param)


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("models") / "gqa")


_PAIRS = [f"{name}-{kernels}" for name in ("gemma3", "phi3-longrope") for kernels in ("reference", "ragged")]


@pytest.fixture(scope="module", params=few(_PAIRS, "gemma3-ragged", "phi3-longrope-reference"))
def awkward_and_kernels(request: pytest.FixtureRequest) -> tuple[str, str]:
    name, _, kernels = request.param.rpartition("-")
    return name, kernels


@pytest.fixture(scope="module")
def awkward(awkward_and_kernels: tuple[str, str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model with windows beside full attention, or with keys that turn by length."""
    name = awkward_and_kernels[0]
    return write_model(tmp_path_factory.mktemp("models") / name, seed=3, **FAMILIES[name])


@pytest.fixture(scope="module")
def cramped(awkward_and_kernels: tuple[str, str]) -> EngineConfig:
    """Steps too small for what is asked: prompts are cut, and requests wait for each other."""
    return EngineConfig(
        device="cpu",
        threads=1,
        kernels=awkward_and_kernels[1],
        overlap=0,
        max_num_seqs=6,
        max_num_batched_tokens=40,
        kv_cache_bytes=1 << 20,
        block_size=4,
    )


@contextmanager
def loading(folder: Path, base: EngineConfig) -> Iterator[Load]:
    """A function that loads engines with changes of `base`. They are closed at the end."""
    engines: list[Engine] = []

    def make(folder: Path = folder, **changes: Any) -> Engine:
        engines.append(Engine.load(folder, replace(base, **changes)))
        return engines[-1]

    yield make
    for one in engines:
        one.close()
        # A test may have left requests in: closing ended them.
        assert one.stats().kv_blocks_used == 0


@pytest.fixture
def load(model_folder: Path, device: torch.device) -> Iterator[Load]:
    with loading(
        model_folder, EngineConfig(device=device.type, max_num_seqs=8, kv_cache_bytes=1 << 20, threads=1)
    ) as make:
        yield make


@pytest.fixture
def load_cramped(awkward: Path, cramped: EngineConfig) -> Iterator[Load]:
    with loading(awkward, cramped) as make:
        yield make
