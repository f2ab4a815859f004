"""A blob is there whole or not at all, whatever is killed; its lines can be read from any line on."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import stat
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from producers.store.blobs import Ahead, BlobNotFound, Blobs, FolderBlobs, lines, open_blobs
from producers.store.blobs.base import MIN_PART, PIECE
from producers.store.blobs.s3 import PART
from tests.aws import Aws
from tests.exhaustive import few
from tests.histories import examples
from tests.producers.store.test_s3 import bucket_of, put
from tests.waiting import PATIENCE_S


@pytest.fixture(params=["folder", "s3"])
def blobs(request: pytest.FixtureRequest, tmp_path: Path) -> Blobs:
    """What holds of blobs, wherever they are."""
    if request.param == "folder":
        return FolderBlobs(tmp_path / "files")
    aws: Aws = request.getfixturevalue("aws")
    return open_blobs(bucket_of(aws))


def test_a_blob_is_read_by_ranges_and_deleted(blobs: Blobs) -> None:
    with blobs.writer("file-1") as writer:
        writer.write(b"abc")
        writer.write(memoryview(b"def"))
        with pytest.raises(BlobNotFound):
            blobs.size("file-1")
        writer.commit()
    assert (blobs.size("file-1"), writer.size) == (6, 6)
    assert [blobs.read("file-1", at, 4) for at in (0, 4, 6, 99)] == [b"abcd", b"ef", b"", b""]
    for _ in range(2):
        blobs.delete("file-1")
    for call in (lambda: blobs.size("file-1"), lambda: blobs.read("file-1", 0, 1), lambda: blobs.join("f", ["file-1"])):
        with pytest.raises(BlobNotFound, match="file-1"):
            call()


def test_no_name_leads_out_of_the_folder(blobs: Blobs) -> None:
    for name in ("", ".", "..", "../x", "a/b", ".parts", "a\0", "x" * 129):
        with pytest.raises(ValueError, match="no name of a blob"):
            blobs.read(name, 0, 1)
        with pytest.raises(ValueError, match="no name of a blob"):
            blobs.writer(name)
        with pytest.raises(ValueError, match="no name of a blob"), blobs.writer("a") as writer:
            writer.commit(name or ".")


@pytest.mark.parametrize("size", [3, 2 * PART + 5])
def test_a_blob_of_any_size_is_there_once_it_is_committed_also_under_another_name(blobs: Blobs, size: int) -> None:
    data = _bytes(size)
    with blobs.writer("a") as writer:
        for at in range(0, size, PIECE):
            writer.write(data[at : at + PIECE])
        with pytest.raises(BlobNotFound):
            blobs.read("a", 0, 1)
        writer.commit("b")
    assert (blobs.size("b"), _all(blobs, "b")) == (size, data)
    with pytest.raises(BlobNotFound):
        blobs.size("a")
    with blobs.writer("b") as writer:
        writer.write(data)
    assert blobs.size("b") == size, "what was not committed changes nothing"
    assert blobs.clean(0) == 0, "and leaves nothing"
    put(blobs, "b", b"another")
    assert _all(blobs, "b") == b"another"


#: None, small ones, and of all sizes; others are of some of these.
NONE, SMALL, ALL_SIZES = (0,), (1, 0, 2), (PART + 1, 7, 2 * MIN_PART, MIN_PART - 1, 9)
SIZES = [NONE, SMALL, (MIN_PART, 1), (1, MIN_PART, 2), ALL_SIZES, (9, PART)]


@pytest.mark.parametrize("sizes", few([(sizes,) for sizes in SIZES], (NONE,), (SMALL,), (ALL_SIZES,)))
def test_parts_of_all_sizes_are_joined_in_order_and_again(blobs: Blobs, sizes: tuple[int, ...]) -> None:
    parts = {f"part-{at}": _bytes(size, at) for at, size in enumerate(sizes)}
    for name, part in parts.items():
        put(blobs, name, part)
    names = [*parts, "part-0"]
    whole = b"".join(parts[name] for name in names)
    for _ in range(2):
        assert blobs.join("whole", names) == len(whole)
        assert _all(blobs, "whole") == whole


def _bytes(size: int, seed: int = 0) -> bytes:
    return random.Random(seed).randbytes(size)


def _all(blobs: Blobs, name: str) -> bytes:
    return blobs.read(name, 0, 1 << 30)


def _write_for_ever(folder: str, written: multiprocessing.synchronize.Event) -> None:
    with FolderBlobs(folder).writer("a") as writer:
        for _ in range(3):
            writer.write(b"x" * PIECE)
        written.set()
        time.sleep(600)


def test_a_killed_writer_leaves_nothing_visible_and_what_it_leaves_is_cleaned(tmp_path: Path) -> None:
    spawn = multiprocessing.get_context("spawn")
    written = spawn.Event()
    writer = spawn.Process(target=_write_for_ever, args=(str(tmp_path), written))
    writer.start()
    assert written.wait(PATIENCE_S)
    os.kill(writer.pid or 0, signal.SIGKILL)
    writer.join()
    blobs = FolderBlobs(tmp_path)
    assert _files(tmp_path) == 1
    assert blobs.clean(60) == 0, "it might still be written to"
    time.sleep(0.01)
    assert blobs.clean(0) == 1
    assert _files(tmp_path) == 0


def test_a_blob_is_for_this_user_alone_whatever_the_umask(tmp_path: Path) -> None:
    old = os.umask(0)
    try:
        with FolderBlobs(tmp_path / "files").writer("a") as writer:
            writer.commit()
        assert [stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "files", tmp_path / "files" / "a")] == [
            0o700,
            0o600,
        ]
    finally:
        os.umask(old)


def _files(folder: Path) -> int:
    return sum(len(files) for _, _, files in os.walk(folder))


@settings(max_examples=examples(20, 60), deadline=None)
@given(
    texts=st.lists(st.tuples(st.integers(0, 12), st.sampled_from([b"\n", b"\r\n"]))),
    last=st.integers(0, 12),
    piece=st.integers(1, 9),
)
def test_lines_are_those_of_the_file_from_any_line_on(
    texts: list[tuple[int, bytes]], last: int, piece: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    longest = 8
    plain = [bytes([97 + at % 26]) * size for at, (size, _) in enumerate([*texts, (last, b"")])]
    whole = b"".join(text + end for text, (_, end) in zip(plain, [*texts, (0, b"")], strict=True))
    blobs = _InPieces(tmp_path_factory.mktemp("lines"), piece)
    put(blobs, "f", whole)
    found = list(lines(blobs, "f", longest=longest))
    expected = plain if last else plain[:-1]
    assert [line.number for line in found] == list(range(1, len(expected) + 1))
    for line, text in zip(found, expected, strict=True):
        assert whole[line.offset : line.end].rstrip(b"\r\n") == text
        # A line end of two bytes may count towards the length.
        assert line.data == text or (line.data is None and len(text) >= longest)
        assert line.data is None or len(text) <= longest
    ahead = Ahead()
    for at, line in enumerate(found):
        assert list(lines(blobs, "f", line.offset, line.number, longest)) == found[at:]
        assert next(lines(blobs, "f", line.offset, line.number, longest, ahead)) == line


class _InPieces(FolderBlobs):
    """Gives less at a time than is asked for, so that lines fall into several pieces."""

    def __init__(self, folder: Path, piece: int) -> None:
        super().__init__(folder)
        self._piece = piece

    def read(self, name: str, start: int, size: int) -> bytes:
        return super().read(name, start, min(size, self._piece))
