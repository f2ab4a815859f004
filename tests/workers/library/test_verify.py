"""A model whose files are not what its manifest says is not loaded."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.waiting import PATIENCE_S
from tests.workers.rig import Rig
from workers.cli.exits import Exit
from workers.errors import Refused
from workers.library import LocalModels, verify
from workers.runtime.worker import load_engine

TINY = Path(__file__).parents[3] / "workers" / "models" / "tiny"


@pytest.fixture
def pulled(tmp_path: Path) -> Path:
    """A version on a models, whole."""
    return LocalModels(tmp_path / "models").copy("mine", TINY).folder


def flip_a_bit(path: Path) -> None:
    """As a disk does that rots: length and time of the file stay."""
    before = path.stat()
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    assert path.stat().st_size == before.st_size


def test_what_is_whole_is_loaded_and_without_a_manifest_there_is_nothing_to_compare(pulled: Path) -> None:
    said: list[str] = []
    verify(pulled, said.append)
    verify(TINY.parent / "tiny", said.append)
    assert len(said) == 1
    assert "are as its manifest.json says" in said[0]


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json", "config.json"])
def test_one_bit_is_enough(pulled: Path, name: str) -> None:
    flip_a_bit(pulled / name)
    with pytest.raises(Refused, match=f"is damaged: the SHA-256 of {name} is not"):
        verify(pulled)
    with pytest.raises(Refused, match="is damaged"):
        load_engine(str(pulled), {"device": "cpu"})


def test_a_file_that_is_gone_is_named(pulled: Path) -> None:
    (pulled / "tokenizer.json").unlink()
    with pytest.raises(Refused, match=r"is damaged: .*tokenizer.json is in its manifest.json, and cannot be read"):
        verify(pulled)


@pytest.mark.parametrize("name", ["model-00001-of-00001.safetensors", "model.safetensors.index.json"])
def test_weights_that_the_manifest_does_not_name_are_refused(pulled: Path, name: str) -> None:
    (pulled / name).write_bytes(b"{}")
    with pytest.raises(Refused, match=f"is damaged: {name} is not in its manifest.json"):
        verify(pulled)


def test_a_manifest_that_names_nothing_vouches_for_nothing(pulled: Path) -> None:
    (pulled / "manifest.json").write_text('{"v": 1, "files": {}}')
    with pytest.raises(Refused, match=r"model.safetensors is not in its manifest.json"):
        verify(pulled)


@pytest.mark.slow
def test_a_worker_says_so_and_ends_refused(pulled: Path, rig: Rig) -> None:
    """Before it has a lease: whoever restarts it finds the status of what would be refused again."""
    flip_a_bit(pulled / "model.safetensors")
    worker = rig.begin_worker(model=str(pulled), engine_factory="workers.runtime.worker:load_engine")
    assert worker.process.wait(PATIENCE_S) != Exit.OK
    assert "is damaged" in worker.log.read_text()
    assert rig.leases() == []
