"""GGUF files that lie, are broken, or are out to do harm: refused by name, in little memory and time."""

from __future__ import annotations

import os
import resource
import struct
from collections.abc import Iterator
from pathlib import Path

import gguf
import pytest
import torch

from engine.errors import ModelError
from engine.models import load_model
from engine.text.card import ModelCard
from tests.engine.gguf_files import write_gguf
from tests.engine.random_models import write_model

CPU = torch.device("cpu")
#: Far less than what any of these files ask for.
_MOST_GROWTH = 400 << 20

pytestmark = pytest.mark.timeout(60)


@pytest.fixture(autouse=True)
def _in_little_memory() -> Iterator[None]:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    yield
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024 < _MOST_GROWTH


def refused(path: Path, *named: str) -> None:
    """Refused with a message for people: it names what is wrong, and is no flood. By all that reads a file."""
    for read in (lambda: load_model(path, "auto", CPU), lambda: ModelCard.from_folder(path)):
        with pytest.raises(ModelError) as caught:
            read()
        message = str(caught.value)
        assert all(part in message for part in (path.name, *named)), message
        assert len(message) < 1000


def text(value: str | bytes) -> bytes:
    data = value if isinstance(value, bytes) else value.encode()
    return struct.pack("<Q", len(data)) + data


def entry(key: str, kind: int, value: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + value


def array(key: str, kind: int, count: int, elements: bytes = b"") -> bytes:
    return entry(key, 9, struct.pack("<IQ", kind, count) + elements)


def tensor(name: str, shape: list[int], kind: int = 0, offset: int = 0) -> bytes:
    return text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, offset)


def file(tmp_path: Path, *, entries: list[bytes] = [], tensors: list[bytes] = [], data: int = 64) -> Path:  # noqa: B006
    """A file of these parts with so many bytes of data, on disk as holes."""
    path = tmp_path / "hostile.gguf"
    head = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(entries)) + b"".join(entries) + b"".join(tensors)
    path.write_bytes(head)
    os.truncate(path, -(-len(head) // 32) * 32 + data)
    return path


@pytest.mark.parametrize("size", [4, 8, 23, 24, 100, 1000])
def test_a_file_that_ends_in_its_header_is_truncated(tmp_path: Path, size: int) -> None:
    path = write_gguf(write_model(tmp_path / "model"), tmp_path / "a.gguf")
    os.truncate(path, size)
    refused(path, "is truncated or not a GGUF file")


def test_a_file_that_ends_in_its_data_is_truncated(tmp_path: Path) -> None:
    path = write_gguf(write_model(tmp_path / "model"), tmp_path / "a.gguf")
    os.truncate(path, path.stat().st_size - 32)
    refused(path, "is truncated or not a GGUF file: tensor")


@pytest.mark.parametrize("version", [0, 1, 4, 1 << 24 | 3])
def test_other_versions_are_refused(tmp_path: Path, version: int) -> None:
    path = tmp_path / "a.gguf"
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", version, 0, 0))
    refused(path, f"GGUF of version {version}")


@pytest.mark.parametrize("counts", [(1 << 62, 0), (0, 1 << 62), (1 << 17, 0), (0, 1 << 17)])
def test_counts_beyond_reason_are_refused(tmp_path: Path, counts: tuple[int, int]) -> None:
    path = tmp_path / "a.gguf"
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, *counts))
    refused(path, "at most")


@pytest.mark.parametrize(
    "lie",
    [
        struct.pack("<Q", 1 << 63),
        struct.pack("<Q", 1 << 40) + b"key",
        entry("a", 8, struct.pack("<Q", 1 << 50)),
        array("a", 4, 1 << 62),
        array("a", 4, 1 << 31),
        array("a", 8, 1 << 62),
        array("a", 8, 3, text("b") + struct.pack("<Q", 1 << 60)),
        array("a", 8, 1 << 22, text("b")),
        array("a", 8, (1 << 22) + 1, text("") * ((1 << 22) + 1)),
    ],
)
def test_lengths_beyond_the_file_are_refused(tmp_path: Path, lie: bytes) -> None:
    refused(file(tmp_path, entries=[lie]), "")


@pytest.mark.parametrize(
    ("lie", "named"),
    [
        (entry("a", 13, b""), "unknown type 13"),
        (array("a", 9, 1, struct.pack("<IQ", 9, 1) * 1000), "array of type 9"),
        (entry("general.alignment", 4, struct.pack("<I", 0)), "general.alignment=0"),
        (entry("general.alignment", 8, text("32")), "general.alignment='32'"),
        (entry("split.count", 4, struct.pack("<I", 1 << 31)), "part 0 of 2147483648"),
    ],
)
def test_entries_that_are_none_are_refused(tmp_path: Path, lie: bytes, named: str) -> None:
    refused(file(tmp_path, entries=[lie]), named)


def test_a_header_that_is_all_of_a_huge_file_is_refused(tmp_path: Path) -> None:
    refused(file(tmp_path, entries=[array("a", 8, 1 << 40)], data=1 << 40), "")
    refused(file(tmp_path, entries=[array("a", 0, 1 << 39)], data=1 << 40), "header is longer than 268435456 bytes")


@pytest.mark.parametrize(
    ("lie", "named"),
    [
        (tensor("a", [1 << 62, 1 << 62]), "shape"),
        (tensor("a", [0]), "shape [0]"),
        (tensor("a", []), "shape []"),
        (tensor("a", [1] * 5), "5 dimensions"),
        (tensor("a", [17]), "has 68 bytes from 0 on"),
        (tensor("a", [4], offset=1), "from 1 on"),
        (tensor("a", [4], offset=1 << 63), "from 9223372036854775808 on"),
        (tensor("a", [4], kind=99), "stored as type 99, which is not served; F32, F16, BF16, Q4_0"),
        (tensor("a", [256], kind=23), "stored as IQ4_XS, which is not served"),
        (tensor("a", [33], kind=8), "rows of 33; Q8_0 packs multiples of 32"),
        (tensor("a" * 2000, [4]), "name of 2000 bytes"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(tmp_path: Path, lie: bytes, named: str) -> None:
    refused(file(tmp_path, tensors=[lie]), named)


def test_tensors_that_lie_on_each_other_are_refused(tmp_path: Path) -> None:
    tensors = [tensor(f"t{i}", [16]) for i in range(2000)]
    refused(file(tmp_path, tensors=tensors), "tensors that lie on each other: 128000 bytes in 64")
    refused(file(tmp_path, tensors=[tensor("a", [4]), tensor("a", [4])]), "tensor 'a' twice")


def test_a_vocabulary_of_too_many_merges_is_refused(tmp_path: Path) -> None:
    def more(writer: gguf.GGUFWriter) -> None:
        words = ["a" * (i + 1) for i in range(2200)]
        writer.add_tokenizer_model("llama")
        writer.add_token_list(words)
        writer.add_token_scores([0.0] * len(words))

    path = write_gguf(write_model(tmp_path / "model", tokenizer=False), tmp_path / "a.gguf", more=more)
    with pytest.raises(ModelError, match="more than 1048576 merges, or of more than 33554432 characters"):
        ModelCard.from_folder(path)


def test_a_vocabulary_that_would_take_years_to_cut_is_refused(tmp_path: Path) -> None:
    def more(writer: gguf.GGUFWriter) -> None:
        writer.add_tokenizer_model("llama")
        writer.add_token_list(["<s>", "a" * (9 << 20)])
        writer.add_token_scores([0.0, 0.0])

    path = write_gguf(write_model(tmp_path / "model", tokenizer=False), tmp_path / "a.gguf", more=more)
    with pytest.raises(ModelError, match="a token of 9437184; at most"):
        ModelCard.from_folder(path)


def test_what_is_no_gguf_file_is_not_taken_for_one(tmp_path: Path) -> None:
    path = tmp_path / "a.gguf"
    path.write_bytes(b"GGML" * 100)
    with pytest.raises(ModelError, match=r"a\.gguf"):
        load_model(path, "auto", CPU)
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(ModelError, match=r"a\.gguf"):
        load_model(path, "auto", CPU)


def test_a_folders_link_to_another_file_is_refused(tmp_path: Path) -> None:
    path = write_gguf(write_model(tmp_path / "model"), tmp_path / "a.gguf")
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "a.gguf").symlink_to(path)
    with pytest.raises(ModelError, match="outside of the model's folder"):
        load_model(folder, "auto", CPU)
