"""Sources whose inputs are texts: the requests that they become, and the vectors that come out."""

from __future__ import annotations

import base64
import io
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet
import pytest
from redis import Redis

from producers import AsyncClient
from producers.contract import keys
from producers.sources.files.folder import Folder, FolderSettings
from producers.sources.files.vectors import GAP_BYTES, BadText, requests, results
from producers.sources.files.work import Work
from producers.sources.settings import BadSources, parse
from producers.sources.source import Context
from producers.store import batches, inbox
from producers.store.blobs import FolderBlobs, Line, lines
from tests.producers.conftest import CARD

EMBEDDER = {**CARD, "capabilities": ["embed"], "pooling": {"dimensions": 2}}
SETTINGS = {"model": "tiny", "truncate": True}


def of(*values: Any) -> list[Line]:
    data = [value if isinstance(value, bytes) else json.dumps(value).encode() for value in values]
    return [Line(number, 0, 0, each) for number, each in enumerate(data, 1)]


def test_texts_become_requests_that_say_which_they_have() -> None:
    texts = [f"text {number}" for number in range(600)]
    made = [
        json.loads(line)
        for line in requests(of(*texts[:300], b"", *[{"text": t} for t in texts[300:]]), SETTINGS, EMBEDDER)
    ]
    assert [request["custom_id"] for request in made] == ["0-255", "256-511", "512-599"]
    assert [text for request in made for text in request["body"].pop("input")] == texts
    assert made[0]["body"] == {"model": "tiny", "truncate": True, "encoding_format": "base64"}
    large = [json.loads(line)["custom_id"] for line in requests(of(*["x" * 300_000] * 3), SETTINGS, EMBEDDER)]
    assert large == ["0-0", "1-1", "2-2"]
    wide = {**EMBEDDER, "pooling": {"dimensions": 4096}}
    assert len(list(requests(of(*texts[:96]), SETTINGS, wide))) == 2


@pytest.mark.parametrize(
    ("line", "why"),
    [
        (b"{]", "not JSON"),
        (b"7", "must be a text, or an object with a `text`"),
        (b'{"txt": "x"}', "must be a text"),
        (b'""', "the text is empty"),
        (b'"a\\u0000"', "the text has a NUL"),
    ],
)
def test_a_line_without_a_text_is_named(line: bytes, why: str) -> None:
    with pytest.raises(BadText, match=why) as refused:
        list(requests(of("fine", line), SETTINGS, EMBEDDER))
    assert refused.value.line == 2


@pytest.mark.parametrize(
    "embed",
    [
        {},
        {"model": ""},
        {"model": "m", "format": "csv"},
        {"model": "m", "format": ["npy"]},
        {"model": "m", "input": ["x"]},
        {"model": "m", "dimensions": 0},
    ],
)
def test_a_bad_table_is_refused(embed: dict[str, Any]) -> None:
    with pytest.raises(BadSources, match=r"\[docs\] embed: .* a table with `model`"):
        parse("docs", {"type": "folder", "folder": "x", "embed": embed})
    with pytest.raises(BadSources, match="leave one of them out"):
        parse("docs", {"type": "folder", "folder": "x", "embed": {"model": "m"}, "endpoint": "/v1/rerank"})


def test_parquet_without_pyarrow_is_refused_when_the_settings_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = {"type": "folder", "folder": "x", "embed": {"model": "m", "format": "parquet"}}
    parse("docs", settings)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(BadSources, match=r"\[docs\] the format parquet needs pyarrow.*'penstock\[parquet\]'"):
        parse("docs", settings)


def answer(first: int, vectors: list[list[float]]) -> bytes:
    data = [{"embedding": base64.b64encode(np.array(each, dtype="<f4").tobytes()).decode()} for each in vectors]
    custom_id = f"{first}-{first + len(vectors) - 1}"
    return json.dumps({"id": "x", "custom_id": custom_id, "response": {"body": {"data": data}}}).encode() + b"\n"


def test_results_are_in_the_order_of_the_texts_with_gaps_where_none_came(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    blobs = FolderBlobs(tmp_path)
    with blobs.writer("in") as writer:
        writer.write(b"".join(requests(of(*["x"] * 600), SETTINGS, EMBEDDER)))
        writer.commit()
    with blobs.writer("out") as writer:
        writer.write(answer(0, [[1, 2]] * 256) + answer(512, [[3, 4]] * 88))
        writer.commit()
    matrix = np.load(io.BytesIO(b"".join(results("npy", blobs, "in", "out"))))
    assert (matrix.shape, matrix.dtype) == ((600, 2), np.float32)
    assert matrix[255].tolist() == [1, 2]
    assert matrix[512].tolist() == [3, 4]
    assert np.isnan(matrix[256:512]).all()
    objects = [json.loads(line) for line in b"".join(results("jsonl", blobs, "in", "out")).splitlines()]
    assert [entry["index"] for entry in objects] == [*range(256), *range(512, 600)]
    assert objects[-1] == {"index": 599, "embedding": [3, 4]}
    monkeypatch.setattr("producers.sources.files.vectors.GROUP_BYTES", 1000)
    table = pyarrow.parquet.ParquetFile(io.BytesIO(b"".join(results("parquet", blobs, "in", "out"))))
    assert (table.num_row_groups, table.metadata.num_rows) == (2, 344)
    assert [str(column.type) for column in table.schema_arrow] == ["int64", "list<element: float not null>"]
    assert table.read().to_pylist() == objects
    empty = pyarrow.parquet.read_table(io.BytesIO(b"".join(results("parquet", blobs, "gone", None))))
    assert (empty.num_rows, empty.column_names) == (0, ["index", "embedding"])
    nothing = np.load(io.BytesIO(b"".join(results("npy", blobs, "gone", None))))
    assert nothing.shape == (0, 0)


@pytest.mark.parametrize("content", [b'"a"\n"b"\n', b'"a"\n7\n'])
async def test_a_file_of_texts_becomes_a_batch_of_requests(
    aclient: AsyncClient, valkey: Redis, tmp_path: Path, content: bytes
) -> None:
    valkey.hset(keys.MODELS, "tiny", json.dumps(EMBEDDER))
    folder = Folder(tmp_path / "watched", moves=True)
    folder.open()
    (tmp_path / "watched" / "inbox" / "a.jsonl").write_bytes(content)
    blobs = FolderBlobs(tmp_path / "blobs")
    settings = FolderSettings(type="folder", folder=str(tmp_path / "watched"), embed=SETTINGS | {"format": "npy"})
    work = Work("docs", Context(aclient, "", "one", ""), folder, blobs, settings)
    (item,) = folder.files()
    await work.open(item)
    ((entry, _),) = await inbox.open_entries(aclient.store, folder.name)
    await work.take_forward(entry, lambda: False)
    batch = await batches.read(aclient.store, entry.id)
    assert batch is not None
    assert (batch.endpoint, batch.fields["vectors"]) == ("/v1/embeddings", "npy")
    if b"7" not in content:
        assert batch.status == "validating"
        (request,) = [json.loads(line.data or b"") for line in lines(blobs, batch.input_file)]
        assert request["body"]["input"] == ["a", "b"]
        return
    assert batch.status == "failed"
    assert [(reason["code"], reason["line"]) for reason in batch.json("reasons")] == [("invalid_text", 2)]
    await work.take_forward(entry, lambda: False)
    assert np.load(tmp_path / "watched" / "outbox" / "a.npy").shape == (0, 0)
    assert b"invalid_text" in (tmp_path / "watched" / "outbox" / "a.errors.jsonl").read_bytes()


def test_vectors_of_two_lengths_are_kept_apart_where_a_model_got_another_version_meanwhile(tmp_path: Path) -> None:
    blobs = FolderBlobs(tmp_path)
    with blobs.writer("in") as writer:
        writer.write(b"".join(requests(of(*["x"] * 4), SETTINGS, EMBEDDER)))
        writer.commit()
    with blobs.writer("out") as writer:
        writer.write(answer(0, [[1, 2], [3, 4]]) + answer(2, [[5, 6, 7], [8]]))
        writer.commit()
    table = pyarrow.parquet.read_table(io.BytesIO(b"".join(results("parquet", blobs, "in", "out"))))
    assert table["embedding"].to_pylist() == [[1, 2], [3, 4], [5, 6, 7], [8]]
    matrix = np.load(io.BytesIO(b"".join(results("npy", blobs, "in", "out"))))
    np.testing.assert_array_equal(matrix, [[1, 2], [3, 4], [np.nan] * 2, [np.nan] * 2])


def test_a_matrix_of_many_texts_without_an_answer_is_made_in_pieces(tmp_path: Path) -> None:
    """As of a batch that was cancelled early."""
    blobs, texts = FolderBlobs(tmp_path), 100_000
    with blobs.writer("in") as writer:
        writer.write(b'{"custom_id": "0-%d"}\n' % (texts - 1))
        writer.commit()
    with blobs.writer("out") as writer:
        writer.write(answer(50_000, [[1.0] * 64]))
        writer.commit()
    sizes = [len(piece) for piece in results("npy", blobs, "in", "out")]
    assert (sum(sizes), max(sizes)) == (128 + texts * 64 * 4, GAP_BYTES)
