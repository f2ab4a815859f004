"""Vectors and scores through the whole system: unmodified clients, a gateway, the queue, workers, and no token."""

from __future__ import annotations

import asyncio
import io
import json
import re
import shlex
import statistics
import subprocess
import uuid
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
from celery import Celery
from redis import Redis

from engine import EngineConfig, PoolingEngine
from engine.labels import Entity
from producers import AsyncClient, Client, TextError
from producers.contract import keys
from producers.errors import InvalidTask
from producers.sources.settings import parse
from producers.sources.source import Context
from producers.store.chunks import chunk_id
from tests.conformance.clients import python
from tests.conformance.conftest import WORKER_LEASE, gateway, sweeping
from tests.conformance.examples import LANGUAGES, Running, examples_of
from tests.engine.sentence_folders import TEXTS, write_encoder_with_tokenizer
from tests.in_process import penstock
from tests.processes import Worker, valkey
from tests.waiting import PATIENCE_S, auntil, until
from workers.cli.up import first_call
from workers.errors import Refused
from workers.library import ResolvedModel

#: Four models, each with its worker, are loaded first.
pytestmark = pytest.mark.timeout(300)
EXAMPLES = examples_of((Path(__file__).parents[2] / "docs" / "use" / "embeddings.md").read_text("utf-8"))
#: What an example of each section of the page prints.
SAYS = {
    "Vectors": r"1\D+48\n|48 \[.*\n48 \[|\"index\": 1, \"embedding\": \[",
    "Rerank": r"0\.\d+ .*\n|1 0\.\d+|\"document\": \{\"text\": ",
    "Classify": r"good|bad|neither",
    "Label parts of texts": r"(PER|LOC|DATE|SUM)\b",
    "Ten thousand texts": r"1000 48",
    "Later, or in the background": r"48|\"rows\": ?\[\[",
}
SHORT = TEXTS[:3]
LABELLED = ("Vectors", "Rerank", "Classify", "Label parts of texts")
NAMES = ("embedder", "reranker", "classifier", "tagger")
SETTINGS = {"dtype": "float32", "threads": 1}


def close(some: object, others: object) -> bool:
    """Equal vectors, but for the last bits, which kernels may compute otherwise in another batch."""
    return np.allclose(np.asarray(some), np.asarray(others), rtol=0, atol=1e-6)


class Served:
    """An embedder, a reranker and two classifiers, each with its worker, and such engines in this process."""

    def __init__(self, url: str, store_url: str, store: Redis, folders: dict[str, Path], files_dir: str) -> None:
        self.url, self.store_url, self.store, self.folders = url, store_url, store, folders
        self.files_dir = files_dir
        config = EngineConfig(dtype="float32", threads=1)
        self.embedder = PoolingEngine.load(folders["embedder"], config)
        self.reranker = PoolingEngine.load(folders["reranker"], config)
        self.classifier = PoolingEngine.load(folders["classifier"], config)
        self.tagger = PoolingEngine.load(folders["tagger"], config)

    def openai(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0)

    def post(self, path: str, **body: object) -> httpx.Response:
        return httpx.post(f"{self.url}{path}", json=body, timeout=PATIENCE_S)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folders = {name: tmp_path_factory.mktemp("models") / name for name in NAMES}
    write_encoder_with_tokenizer(folders["embedder"], "bert", matryoshka_dimensions=[16, 32])
    kinds = {"": "Transformer", "1_Pooling": "Pooling", "2_Normalize": "Normalize"}
    modules = [{"path": path, "type": f"sentence_transformers.models.{kind}"} for path, kind in kinds.items()]
    (folders["embedder"] / "modules.json").write_text(json.dumps(modules))
    (folders["embedder"] / "1_Pooling").mkdir()
    (folders["embedder"] / "1_Pooling" / "config.json").write_text('{"pooling_mode": "mean"}')
    prompts = {"prompts": {"query": "query: "}}
    (folders["embedder"] / "config_sentence_transformers.json").write_text(json.dumps(prompts))
    write_encoder_with_tokenizer(folders["reranker"], "bert", "ForSequenceClassification", num_labels=1)
    labels = {0: "good", 1: "bad", 2: "neither"}
    write_encoder_with_tokenizer(folders["classifier"], "distilbert", "ForSequenceClassification", id2label=labels)
    named = dict(enumerate(["O", "B-PER", "I-PER", "B-LOC", "I-LOC", "DATE", "SUM"]))
    write_encoder_with_tokenizer(folders["tagger"], "bert", "ForTokenClassification", id2label=named)
    with valkey() as (store_url, store):
        load = "workers.runtime.worker:load_engine"
        workers = [
            Worker(
                store_url,
                model=str(folder),
                engine_factory=load,
                engine=SETTINGS,
                lease=WORKER_LEASE,
                warm=True,
                LOG_LEVEL="WARNING",
            )
            for folder in folders.values()
        ]
        folder = tmp_path_factory.mktemp("files")
        with ExitStack() as entered:
            for worker in workers:
                entered.enter_context(worker)
            url, _ = entered.enter_context(gateway(store_url, files_dir=str(folder)))
            for worker in workers:
                worker.wait_until(lambda worker=worker: bool(worker.incarnations), 180)
            with sweeping(store_url, str(folder), folder):
                yield Served(url, store_url, store, folders, str(folder))


def test_openais_client_gets_the_engines_vectors(served: Served) -> None:
    expected = served.embedder.embed(SHORT)
    client = served.openai()
    answer = client.embeddings.create(model="embedder", input=SHORT)  # base64 on the wire
    assert close(np.array([entry.embedding for entry in answer.data], dtype=np.float32), expected)
    assert answer.usage.prompt_tokens == answer.usage.total_tokens > 10
    (one,) = client.embeddings.create(model="embedder", input=SHORT[0], encoding_format="float").data
    assert close(np.array(one.embedding, dtype=np.float32), expected[0])
    tokenizer = served.embedder.tokenizer
    assert tokenizer is not None
    ids = [tokenizer.encode(text) for text in SHORT]
    answer = client.embeddings.create(model="embedder", input=ids)
    assert close(np.array([entry.embedding for entry in answer.data], dtype=np.float32), expected)
    (cut,) = client.embeddings.create(model="embedder", input=ids[0], dimensions=16).data
    assert close(np.array(cut.embedding, dtype=np.float32), served.embedder.embed([ids[0]], dimensions=16)[0])
    query = served.post("/v1/embeddings", model="embedder", input=SHORT[0], prompt_name="query").json()
    expected = served.embedder.embed([SHORT[0]], prompt="query")[0]
    assert close(np.array(query["data"][0]["embedding"], dtype=np.float32), expected)


@pytest.mark.parametrize("path", ["/v1/rerank", "/v2/rerank"])
def test_documents_are_ranked_by_the_engines_scores(served: Served, path: str) -> None:
    scores = served.reranker.score([(TEXTS[0], document) for document in SHORT])
    order = sorted(range(3), key=lambda index: -scores[index])
    documents = [SHORT[0], {"text": SHORT[1]}, SHORT[2]]
    more = {"top_n": 2, "return_documents": True}
    answer = served.post(path, model="reranker", query=TEXTS[0], documents=documents, **more).json()
    assert [result["index"] for result in answer["results"]] == order[:2]
    assert [result["relevance_score"] for result in answer["results"]] == pytest.approx(sorted(scores)[:0:-1])
    assert answer["results"][0]["document"] == {"text": SHORT[order[0]]}
    with Client(served.store_url) as client:
        ranked = client.rerank("reranker", TEXTS[0], SHORT)
        assert ranked == pytest.approx(scores)
    scored = served.post("/v1/score", model="reranker", text_1=TEXTS[0], text_2=SHORT).json()
    assert [entry["score"] for entry in scored["data"]] == pytest.approx(scores)


def test_texts_are_classified_as_the_engine_does(served: Served) -> None:
    expected = served.classifier.classify(SHORT)
    answer = served.post("/v1/classify", model="classifier", input=SHORT).json()
    assert [entry["label"] for entry in answer["data"]] == [max(each, key=each.__getitem__) for each in expected]
    assert close([entry["probs"] for entry in answer["data"]], [list(each.values()) for each in expected])
    assert {entry["num_classes"] for entry in answer["data"]} == {3}
    above = served.post("/v1/classify", model="classifier", input=SHORT, threshold=0.3).json()["data"]
    chosen = [[(label, value) for label, value in labels.items() if value >= 0.3] for labels in expected]
    for entry, kept in zip(above, chosen, strict=True):
        assert [each["label"] for each in entry["labels"]] == [label for label, _ in sorted(kept, key=lambda k: -k[1])]
    with Client(served.store_url) as client:
        classified = client.classify("classifier", SHORT)
        few = client.classify("classifier", SHORT, threshold=0.3)
    assert [list(each) for each in classified] == [["good", "bad", "neither"]] * 3
    assert [list(each) for each in few] == [[label for label, _ in kept] for kept in chosen]
    assert close([list(each.values()) for each in classified], [list(each.values()) for each in expected])


def test_parts_of_texts_are_labelled_as_the_engine_does(served: Served) -> None:
    """By each way in, also in chunks; with an aggregation and a threshold; a bad text by itself."""
    plain, words = served.tagger.classify_tokens(SHORT), served.tagger.classify_tokens(SHORT, aggregation="first")
    middle = statistics.mean(entity.score for entities in words for entity in entities)
    options: dict[str, Any] = {"aggregation_strategy": "first", "threshold": middle}
    expected = [[entity for entity in entities if entity.score >= middle] for entities in words]
    assert 0 < sum(map(len, expected)) < sum(map(len, words))

    def alike(entities: Any, others: list[Entity]) -> bool:
        told = [each if isinstance(each, Entity) else Entity(*(each[name] for name in FIELDS)) for each in entities]
        return close([each.score for each in told], [each.score for each in others]) and [
            replace(each, score=0) for each in told
        ] == [replace(each, score=0) for each in others]

    body = {"model": "tagger", "input": [*SHORT, ""], "on_error": "item", **options}
    answer = served.post("/v1/token_classify", **body).json()
    for entry, text, entities in zip(answer["data"], SHORT, expected, strict=False):
        assert alike(entry["entities"], entities)
        assert [each["text"] for each in entry["entities"]] == [text[e.start : e.end] for e in entities]
    assert (answer["data"][3]["entities"], answer["data"][3]["error"]["code"]) == ([], "empty_prompt")
    alone = served.post("/v1/token_classify", model="tagger", input=SHORT[0]).json()["data"]
    assert alike(alone[0]["entities"], plain[0])
    with Client(served.store_url) as client:
        many = client.classify_tokens("tagger", SHORT * 100, **options)
        assert len(many) == 300
        assert all(alike(row, expected[at % 3]) for at, row in enumerate(many))
        handle = client.submit(kind="token_classify", model="tagger", input=SHORT)
        assert all(map(alike, handle.result(PATIENCE_S).rows or (), plain))
    view = httpx.get(f"{served.url}/v1/tasks/{handle.id}", timeout=PATIENCE_S).json()
    assert all(map(alike, view["rows"], plain))
    chunked = served.post("/v1/token_classify", model="tagger", input=SHORT * 100, **options).json()["data"]
    assert all(alike(entry["entities"], expected[entry["index"] % 3]) for entry in chunked)
    for fields, message in (
        ({"input": [[5]]}, "input"),
        ({"aggregation_strategy": "last"}, "aggregation_strategy"),
        ({"threshold": 1.5}, "threshold"),
        ({"model": "classifier"}, "model"),
    ):
        refused = served.post("/v1/token_classify", **{"model": "tagger", "input": SHORT} | fields)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, message), refused.text


FIELDS = ("label", "score", "start", "end")


def test_the_commands_print_labels_and_ranks(
    served: Served, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def printed(*arguments: str) -> list[Any]:
        penstock().main([*arguments, "--url", served.url], standalone_mode=False)
        return [json.loads(line) for line in capsys.readouterr().out.splitlines()]

    for entry, labels in zip(printed("classify", "classifier", *SHORT), served.classifier.classify(SHORT), strict=True):
        assert [each["label"] for each in entry["labels"]] == sorted(labels, key=labels.__getitem__, reverse=True)
    assert printed("classify", "classifier", SHORT[0], "--threshold", "1")[0]["labels"] == []
    entities = served.tagger.classify_tokens(SHORT[:1], aggregation="none")[0]
    (entry,) = printed("classify", "tagger", "--tokens", "--aggregation-strategy", "none", SHORT[0])
    assert [(each["start"], each["label"]) for each in entry["entities"]] == [(e.start, e.label) for e in entities]
    monkeypatch.setattr("sys.stdin", io.StringIO("".join(f"{line}\n" for line in SHORT)))
    ranked = printed("rerank", "reranker", TEXTS[0], "--top-n", "2")
    scores = served.reranker.score([(TEXTS[0], document) for document in SHORT])
    assert [each["index"] for each in ranked] == sorted(range(3), key=lambda at: -scores[at])[:2]
    assert ranked[0]["document"] == SHORT[ranked[0]["index"]]


def test_the_command_prints_vectors_of_arguments_and_lines(
    served: Served, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = SHORT * 25
    monkeypatch.setattr("sys.stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
    for texts in (SHORT, []):
        penstock().main(["embed", "embedder", *texts, "--url", served.url], standalone_mode=False)
    printed = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [entry["index"] for entry in printed] == [*range(3), *range(len(lines))]
    vectors = np.array([entry["embedding"] for entry in printed], dtype=np.float32)
    assert close(vectors, np.tile(served.embedder.embed(SHORT), (26, 1)))
    with pytest.raises(Refused, match=r"texts 0 to 1: input\[1\] is empty"):
        penstock().main(["embed", "embedder", "a", "", "--url", served.url], standalone_mode=False)
    argv = ["embed", "embedder", "a", "", "--on-error", "item", "--url", served.url]
    penstock().main(argv, standalone_mode=False)
    good, bad = map(json.loads, capsys.readouterr().out.splitlines())
    assert (good["index"], len(good["embedding"])) == (0, 48)
    assert bad == {"index": 1, "error": {"code": "empty_prompt", "message": "the text is empty"}}


def test_a_task_of_a_kind_has_one_entry_with_its_result(served: Served) -> None:
    expected = served.embedder.embed(SHORT)
    with Client(served.store_url) as client:
        handle = client.submit(kind="embed", model="embedder", input=SHORT, metadata={"a": "b"})
        result = handle.result(PATIENCE_S)
        assert close(np.array(result.rows, dtype=np.float32), expected)
        assert result.usage["output_tokens"] == 0
        assert served.store.xlen(keys.stream(handle.id)) == 1
        assert close(np.array(client.embed("embedder", SHORT[0])), expected[:1])
    # Its result counts as its tenant's from the beginning.
    record = served.store.hgetall(keys.task(handle.id))
    (entry,) = (json.loads(fields["e"]) for _, fields in served.store.xrange(keys.stream(handle.id)))
    assert len(entry["result"]["data"]) == int(record["result_bytes"]) == 768
    assert int(record["kept"].split()[0]) > 768 + len(record["task"])
    view = httpx.get(f"{served.url}/v1/tasks/{handle.id}", timeout=PATIENCE_S).json()
    assert (view["status"], view["metadata"]) == ("completed", {"a": "b"})
    assert close(np.array(view["rows"], dtype=np.float32), expected)
    row = next(fields for _, fields in served.store.xrange(keys.LEDGER) if fields["id"] == handle.id)
    assert (int(row["prompt"]), row["output"], row["model"]) == (result.usage["prompt_tokens"], "0", "embedder")


@pytest.mark.parametrize("encoding", ["float", "base64"])
def test_a_request_of_more_texts_than_a_chunk_has_one_answer(served: Served, encoding: str) -> None:
    few = served.post("/v1/embeddings", model="embedder", input=SHORT, encoding_format=encoding).json()
    many = served.post("/v1/embeddings", model="embedder", input=SHORT * 200, encoding_format=encoding).json()
    assert many.keys() == few.keys()
    assert (many["model"], many["object"]) == (few["model"], "list")
    assert many["usage"]["total_tokens"] == 200 * few["usage"]["total_tokens"]
    assert [entry["index"] for entry in many["data"]] == [*range(600)]
    if encoding == "float":
        vectors = [entry["embedding"] for entry in many["data"]]
        assert close(vectors, np.tile([entry["embedding"] for entry in few["data"]], (200, 1)))


def test_a_repeated_request_of_many_texts_is_answered_from_the_same_task(served: Served) -> None:
    body = {"model": "embedder", "input": SHORT * 100}
    headers = {"idempotency-key": uuid.uuid4().hex}
    first, second = (
        httpx.post(f"{served.url}/v1/embeddings", json=body, headers=headers, timeout=PATIENCE_S) for _ in range(2)
    )
    assert [answer.headers.get("idempotent-replayed") for answer in (first, second)] == [None, "true"]
    assert first.json() == second.json()


def test_many_texts_are_scored_ranked_and_classified(served: Served) -> None:
    documents = SHORT * 100
    scores = served.reranker.score([(TEXTS[0], document) for document in SHORT])
    body = {"model": "reranker", "query": TEXTS[0], "documents": documents, "top_n": 100, "return_documents": True}
    ranked = served.post("/v1/rerank", **body).json()["results"]
    best = max(range(3), key=scores.__getitem__)
    assert {result["index"] % 3 for result in ranked} == {best}
    assert {result["document"]["text"] for result in ranked} == {SHORT[best]}
    scored = served.post("/v1/score", model="reranker", text_1=TEXTS[0], text_2=documents).json()
    assert [entry["score"] for entry in scored["data"]] == pytest.approx(scores * 100)
    expected = served.classifier.classify(SHORT) * 100
    classified = served.post("/v1/classify", model="classifier", input=documents).json()
    assert [entry["label"] for entry in classified["data"]] == [max(each, key=each.__getitem__) for each in expected]


def test_a_task_of_many_texts_is_a_task_as_any_other(served: Served) -> None:
    """Waited for, read, followed, retried, explained, listed, charged once by the ledger, and deleted."""
    url, body = f"{served.url}/v1/tasks", {"kind": "embed", "model": "embedder", "input": SHORT * 100}
    view = httpx.post(
        url, json={**body, "metadata": {"many": "1"}}, headers={"prefer": "wait=60"}, timeout=PATIENCE_S
    ).json()
    expected = np.tile(served.embedder.embed(SHORT), (100, 1))
    assert (view["status"], view["error"]) == ("completed", None)
    assert close(np.array(view["rows"], dtype=np.float32), expected)
    task = f"{url}/{view['id']}"
    assert httpx.get(task, timeout=PATIENCE_S).json() == httpx.get(task, timeout=PATIENCE_S).json() | {
        "rows": view["rows"]
    }
    events = [
        line for line in httpx.get(f"{task}/events", timeout=PATIENCE_S).text.splitlines() if line.startswith("data:")
    ]
    assert [json.loads(line[5:]).get("first") for line in events] == [0, 256, None]
    listed = httpx.get(url, params={"metadata[many]": "1"}, timeout=PATIENCE_S).json()["data"]
    assert [entry["id"] for entry in listed] == [view["id"]]
    assert httpx.get(f"{task}/explain", timeout=PATIENCE_S).json()["status"] == "completed"
    rows = [fields for _, fields in served.store.xrange(keys.LEDGER)]
    of_chunks = [row for row in rows if row["id"] in {chunk_id(view["id"], number) for number in range(2)}]
    assert sum(int(row["prompt"]) for row in of_chunks) == view["usage"]["prompt_tokens"]
    assert not [row for row in rows if row["id"] == view["id"]]
    again = httpx.post(f"{task}/retry", headers={"prefer": "wait=60"}, timeout=PATIENCE_S).json()
    assert (again["retried_from"], close(again["rows"], view["rows"])) == (view["id"], True)
    with Client(served.store_url) as client:
        assert close(np.array(client.get(again["id"]).result().rows), expected)
    for name in (view["id"], again["id"]):
        assert httpx.delete(f"{url}/{name}", timeout=PATIENCE_S).status_code == 200
    assert not served.store.exists(keys.task(chunk_id(view["id"], 0)), keys.stream(chunk_id(view["id"], 1)))


def test_a_bad_text_fails_itself_alone_if_its_request_says_so(served: Served) -> None:
    """At each endpoint, in each form, and in whichever chunk; the others have their results."""
    long, item = TEXTS[4] * 30, {"on_error": "item"}
    texts = [SHORT[0], "", long, SHORT[1]]
    expected = served.embedder.embed(SHORT[:2])

    def codes(entries: list[dict[str, Any]]) -> list[str | None]:
        return [entry["error"]["code"] if "error" in entry else None for entry in entries]

    answer = served.post("/v1/embeddings", model="embedder", input=texts, **item).json()
    assert codes(answer["data"]) == [None, "empty_prompt", "context_length_exceeded", None]
    assert re.fullmatch(r"the text has \d+ tokens; the model takes \d+; .*", answer["data"][2]["error"]["message"])
    assert close(np.array([answer["data"][at]["embedding"] for at in (0, 3)], dtype=np.float32), expected)
    data = served.openai().embeddings.create(model="embedder", input=texts, extra_body=item).data
    assert close(np.array([data[0].embedding, data[3].embedding], dtype=np.float32), expected)
    assert [len(entry.embedding) for entry in data[1:3]] == [0, 0]
    ids = served.post("/v1/embeddings", model="embedder", input=[[5], [10**6], []], **item).json()["data"]
    assert codes(ids) == [None, "invalid_value", "empty_prompt"]
    alone = served.post("/v1/embeddings", model="embedder", input=["", ""], **item).json()
    assert (codes(alone["data"]), alone["usage"]["prompt_tokens"]) == (["empty_prompt"] * 2, 0)
    ranked = served.post("/v1/rerank", model="reranker", query="q", documents=texts, truncate=False, **item).json()
    assert {result["index"] for result in ranked["results"]} == {0, 3}
    assert [error["index"] for error in ranked["errors"]] == [1, 2]
    scored = served.post("/v1/score", model="reranker", text_1="q", text_2=texts, truncate=False, **item).json()
    assert [entry["score"] is None for entry in scored["data"]] == [False, True, True, False]
    classes = served.post("/v1/classify", model="classifier", input=texts, **item).json()["data"]
    assert [entry["label"] is None for entry in classes] == [False, True, True, False]
    many = [SHORT[0]] * 300
    many[7] = many[299] = ""
    with Client(served.store_url) as client:
        handle = client.submit(kind="embed", model="embedder", input=many, on_error="item")
        rows = handle.result(PATIENCE_S).rows or ()
        failed = [at for at, row in enumerate(rows) if isinstance(row, TextError)]
        assert (len(rows), failed) == (300, [7, 299])
        labels = client.classify("classifier", ["", SHORT[0]], on_error="item")
        assert [isinstance(row, TextError) for row in labels] == [True, False]
        assert isinstance(client.rerank("reranker", "q", ["", "a"], on_error="item")[0], TextError)
    view = httpx.get(f"{served.url}/v1/tasks/{handle.id}").json()["rows"]
    assert (len(view), view[7]["error"]["code"], view[299]["error"]["code"]) == (300, "empty_prompt", "empty_prompt")
    answer = served.post("/v1/embeddings", model="embedder", input=many, **item).json()["data"]
    assert [at for at, code in enumerate(codes(answer)) if code] == [7, 299]


def test_a_bad_text_among_many_is_named_by_its_number(served: Served) -> None:
    texts = SHORT * 100 + ["long " * 2000] + SHORT
    answer = served.post("/v1/embeddings", model="embedder", input=texts)
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["param"]) == (400, "context_length_exceeded", "input")
    assert error["message"].startswith("input[300] has ")
    empty = served.post("/v1/embeddings", model="embedder", input=[*SHORT * 100, ""]).json()["error"]
    assert (empty["code"], empty["message"][:10]) == ("empty_prompt", "input[300]")


@pytest.mark.parametrize("form", ["npy", "jsonl"])
async def test_a_file_of_texts_becomes_a_file_of_vectors(served: Served, tmp_path: Path, form: str) -> None:
    table = {"type": "folder", "folder": str(tmp_path), "settled_seconds": 0.0, "tenant": form}
    settings = parse("library", table | {"embed": {"model": "embedder", "format": form}})
    texts = SHORT * 100
    (tmp_path / "inbox").mkdir()
    (tmp_path / "inbox" / "a.jsonl").write_text("".join(f"{json.dumps(text)}\n" for text in texts))
    async with AsyncClient(served.store_url) as client:
        source = settings.source("library", Context(client, served.store_url, form, served.files_dir))
        running = asyncio.create_task(source.run())
        await auntil((tmp_path / "done" / "a.jsonl").exists)
        running.cancel()
        await asyncio.wait((running,))
    if form == "npy":
        vectors = np.load(tmp_path / "outbox" / "a.npy")
    else:
        lines = [json.loads(line) for line in (tmp_path / "outbox" / "a.jsonl").read_text().splitlines()]
        vectors = np.array([line["embedding"] for line in lines])
    assert close(vectors, np.tile(served.embedder.embed(SHORT), (100, 1)))
    assert (tmp_path / "outbox" / "a.errors.jsonl").read_bytes() == b""


def test_a_plain_celery_task_of_a_kind_returns_its_rows(served: Served) -> None:
    ranked = {"query": TEXTS[0], "input": SHORT}
    sent: list[tuple[str, str, Any, dict[str, Any]]] = [
        ("embedder", "penstock.generate", (), {"kind": "embed", "input": SHORT}),
        ("embedder", "penstock.embed", (SHORT,), {}),
        ("reranker", "penstock.rerank", (), ranked),
        ("reranker", "penstock.score", (), ranked),
        ("classifier", "penstock.classify", (SHORT,), {}),
        ("tagger", "penstock.token_classify", (SHORT,), {"aggregation_strategy": "first"}),
        ("reranker", "penstock.embed", (SHORT,), {}),
    ]
    app = Celery("sender", broker=served.store_url, backend=served.store_url, set_as_current=False)
    with app:
        results = [
            app.send_task(name, args, kwargs, queue=keys.model_queue(model)) for model, name, args, kwargs in sent
        ]
        *rows, tagged = [result.get(timeout=PATIENCE_S)["rows"] for result in results[:-1]]
        with pytest.raises(Exception, match="cannot embed; it can rerank"):
            results[-1].get(timeout=PATIENCE_S)
    scores = served.reranker.score([(TEXTS[0], document) for document in SHORT])
    vectors, classes = served.embedder.embed(SHORT), served.classifier.classify(SHORT)
    for made, right in zip(rows[:4], (vectors, vectors, *[np.array(scores)[:, None]] * 2), strict=True):
        assert close(np.array(made, dtype=np.float32), right)
    assert close(np.array(rows[4]), np.array([[*each.values()] for each in classes]))
    with Client(served.store_url) as client:
        direct = client.classify_tokens("tagger", SHORT, aggregation_strategy="first")
    assert [len(each) for each in tagged] == [len(each) for each in direct]


def test_the_example_of_plain_celery_runs(served: Served) -> None:
    page = (Path(__file__).parents[2] / "docs" / "use" / "celery.md").read_text("utf-8")
    (example,) = re.findall(r'^```python\n(result = app.send_task\("penstock.embed".*?)^```$', page, re.M | re.S)
    names: dict[str, Any] = {}
    with Celery("sender", broker=served.store_url, backend=served.store_url, set_as_current=False) as names["app"]:
        exec(compile(example, "docs/use/celery.md", "exec"), names)
    assert [len(vector) for vector in names["vectors"]] == [48, 48]


def test_coheres_clients_rank_documents(served: Served) -> None:
    told = python("cohere_client.py", served.url)
    documents = ["A penstock feeds a turbine.", "rain", "The queue is long."]
    expected = served.reranker.score([("What feeds a turbine?", document) for document in documents])
    order = sorted(range(3), key=lambda index: -expected[index])
    for ranked in (told["ranked"], told["returned"]):
        assert [index for index, _ in ranked] == order
        assert [score for _, score in ranked] == pytest.approx([expected[index] for index in order])
    assert (told["best"], told["documents"]) == (told["ranked"][:1], [documents[index] for index in order])
    assert told["id"].startswith("rerank-")
    assert "cannot rerank; it can embed" in told["refused"]


def test_infinitys_clients_say_what_asks_for_nothing(served: Served) -> None:
    body = {"model": "embedder", "input": SHORT[:1], "encoding_format": "float", "user": "", "modality": "text"}
    for dimensions, status in ((0, 200), (False, 400), (-1, 400)):
        assert served.post("/v1/embeddings", **body, dimensions=dimensions).status_code == status
    rank = {"model": "reranker", "query": TEXTS[0], "documents": SHORT, "return_documents": False, "raw_scores": False}
    assert len(served.post("/v1/rerank", **rank, modality="text").json()["results"]) == 3
    for path, fields, name in (("embeddings", body, "modality"), ("rerank", rank, "raw_scores")):
        refused = served.post(f"/v1/{path}", **{**fields, name: "image" if name == "modality" else True})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, name)


@pytest.mark.exhaustive
def test_litellm_embeds_and_ranks_by_each_provider(served: Served) -> None:
    told = python("litellm_embeddings_client.py", served.url)
    texts = ["A penstock feeds a turbine.", "rain"]
    expected = served.embedder.embed(texts)
    assert told["vectors"].keys() == {"openai", "infinity", "hosted_vllm"}
    assert all(close(vectors, expected) for vectors in told["vectors"].values())
    assert close(told["cut"], served.embedder.embed(texts, dimensions=16))
    documents = [*texts, "The queue is long."]
    scores = served.reranker.score([("What feeds a turbine?", document) for document in documents])
    order = sorted(range(3), key=lambda index: -scores[index])[:2]
    assert told["ranked"].keys() == {"infinity", "cohere", "hosted_vllm", "jina_ai"}
    for ranked in told["ranked"].values():
        assert [index for index, _ in ranked] == order
        assert [score for _, score in ranked] == pytest.approx([scores[index] for index in order])
    assert "cannot embed; it can rerank" in told["refused"]


def test_langchains_embeddings_are_the_engines(served: Served) -> None:
    told = python("langchain_embeddings_client.py", served.url)
    expected = served.embedder.embed(["A penstock feeds a turbine.", "rain"])
    assert close(told["documents"], expected)
    assert close(told["awaited"], expected)
    assert close(told["query"], expected[0])


def test_ollamas_embeddings_are_the_engines(served: Served) -> None:
    told = python("ollama_client.py", served.url, "embedder")
    texts = ["A penstock feeds a turbine.", "rain"]
    expected = served.embedder.embed(texts)
    assert close(told["both"], expected)
    assert close([told["one"][0], told["older"]], [expected[0]] * 2)
    assert close(told["cut"], served.embedder.embed(texts, dimensions=16))
    assert (told["tokens"] > 2, told["can"]) == (True, ["embedding"])


@pytest.mark.exhaustive
def test_langchains_ollama_embeddings_are_the_engines(served: Served) -> None:
    told = python("langchain_ollama_client.py", served.url, "embedder")
    expected = served.embedder.embed(["A penstock feeds a turbine.", "rain"])
    assert close(told["documents"], expected)
    assert close(told["query"], expected[0])


@pytest.mark.exhaustive
def test_llama_indexs_embeddings_are_the_engines(served: Served) -> None:
    told = python("llama_index_embeddings_client.py", served.url)
    expected = served.embedder.embed(["A penstock feeds a turbine.", "rain"])
    assert close(told["documents"], expected)
    assert close(told["awaited"], expected)
    assert close(told["query"], expected[0])
    assert close(told["cut"], served.embedder.embed(["A penstock feeds a turbine."], dimensions=16)[0])


def test_infinitys_client_embeds_and_ranks(served: Served) -> None:
    told = python("infinitys_client.py", served.url)
    texts = ["A penstock feeds a turbine.", "rain"]
    assert close(told["vectors"], served.embedder.embed(texts))
    documents = [*texts, "The queue is long."]
    scores = served.reranker.score([("What feeds a turbine?", document) for document in documents])
    order = sorted(range(3), key=lambda index: -scores[index])[:2]
    assert [index for index, _ in told["ranked"]] == order
    assert [score for _, score in told["ranked"]] == pytest.approx([scores[index] for index in order])


@pytest.mark.parametrize(("section", "language", "source"), EXAMPLES)
def test_an_example_of_the_page_runs(served: Served, tmp_path: Path, section: str, language: str, source: str) -> None:
    ran = Running(tmp_path, served.url, {"BROKER_URL": served.store_url}).run(language, source)
    assert ran.returncode == 0, ran.stderr
    assert re.search(SAYS[section], ran.stdout), ran.stdout
    assert '"error": {' not in ran.stdout


def test_the_page_has_every_endpoint_in_every_language() -> None:
    has = {(each.values[0], each.values[1]) for each in EXAMPLES}
    assert has >= {(section, language) for section in LABELLED for language in LANGUAGES}


@pytest.mark.parametrize(("name", "says"), [*zip(NAMES, ("embedding", "results", "probs", "entities"), strict=True)])
def test_what_up_says_to_try_first_works(
    served: Served, capsys: pytest.CaptureFixture[str], name: str, says: str
) -> None:
    program, *arguments = shlex.split(first_call(served.url, ResolvedModel(name, served.folders[name])))
    if program == "penstock":
        penstock().main(arguments, standalone_mode=False)
        printed = capsys.readouterr().out
    else:
        printed = subprocess.run([program, "-s", *arguments], capture_output=True, text=True, check=True).stdout
    assert f'"{says}":' in printed


LONG = TEXTS[4] * 2


def alike(some: Any, others: Any) -> bool:
    """Equal JSON, but for the last bits of numbers."""
    if isinstance(some, float):
        return abs(some - others) < 1e-6
    if isinstance(some, list):
        return len(some) == len(others) and all(map(alike, some, others))
    if isinstance(some, dict):
        return some.keys() == others.keys() and all(alike(value, others[name]) for name, value in some.items())
    return bool(some == others)


#: Path -> a body, one that is refused before it is queued, and one that a worker refuses; their parameter at fault.
LINES: dict[str, tuple[list[dict[str, Any]], str]] = {
    "/v1/embeddings": (
        [
            {"model": "embedder", "input": SHORT, "dimensions": 16, "prompt_name": "query"},
            {"model": "embedder", "input": "a", "dimensions": 20},
            {"model": "embedder", "input": LONG},
        ],
        "dimensions input",
    ),
    "/v1/rerank": (
        [
            {"model": "reranker", "query": TEXTS[0], "documents": [{"text": TEXTS[1]}, TEXTS[2]], "top_n": 1},
            {"model": "reranker", "query": TEXTS[0], "documents": ["a", ""]},
            {"model": "reranker", "query": TEXTS[0], "documents": [LONG], "truncate": False},
        ],
        "documents documents",
    ),
    "/v1/classify": (
        [
            {"model": "classifier", "input": SHORT, "service_tier": "flex"},
            {"model": "classifier", "input": SHORT, "stream": False},
            {"model": "classifier", "input": LONG},
        ],
        "stream input",
    ),
    "/v1/token_classify": (
        [
            {"model": "tagger", "input": SHORT, "aggregation_strategy": "none", "threshold": 0.5},
            {"model": "tagger", "input": [[5]]},
            {"model": "tagger", "input": LONG},
        ],
        "input input",
    ),
    "/v1/score": (
        [
            {"model": "reranker", "text_1": TEXTS[0], "text_2": SHORT},
            {"model": "reranker", "text_1": TEXTS[0], "text_2": []},
            {"model": "reranker", "text_1": TEXTS[0], "text_2": [LONG], "truncate": False},
        ],
        "text_2 text_2",
    ),
}


@pytest.mark.parametrize("path", LINES)
def test_lines_of_a_batch_are_answered_as_by_their_endpoint(served: Served, path: str) -> None:
    client, (bodies, params) = served.openai(), LINES[path]
    requests = [
        {"custom_id": str(k), "method": "POST", "url": path, "body": body}
        for k, body in enumerate([*bodies, bodies[0]])
    ]
    lines = "\n".join(map(json.dumps, requests))
    file = client.files.create(file=("in.jsonl", lines.encode()), purpose="batch")
    batch_id = client.batches.create(input_file_id=file.id, endpoint=path, completion_window="1h").id  # type: ignore[arg-type]

    def completed() -> Any:
        batch = client.batches.retrieve(batch_id)
        return batch if batch.status == "completed" else None

    batch = until(completed)
    output, errors = (
        [json.loads(line) for line in client.files.content(each).text.splitlines()]
        for each in (batch.output_file_id, batch.error_file_id)
    )
    answers = [served.post(path, **body).json() for body in bodies]
    told = [line["response"]["body"]["error"] for line in errors]
    assert [error["param"] for error in told] == params.split()
    assert told == [answer["error"] for answer in answers[1:]]
    own = {"id", "created"}
    expected = {name: value for name, value in answers[0].items() if name not in own}
    assert [line["custom_id"] for line in output] == ["0", "3"]
    for line in output:
        assert alike({name: value for name, value in line["response"]["body"].items() if name not in own}, expected)
    assert not served.store.hexists(keys.batch(batch_id), "result_bytes"), "nothing is left of what its results took"


@pytest.mark.parametrize(
    ("path", "body", "param", "message"),
    [
        ("embeddings", {"input": ""}, "input", r"input\[0\] is empty"),
        ("embeddings", {"input": []}, "input", "input is missing"),
        ("embeddings", {"input": ["a", 1]}, "input", r"input\[1\] is 1; it must be text or a list of token ids"),
        ("embeddings", {"input": "a\0b"}, "input", r"input\[0\] has a NUL"),
        ("embeddings", {"input": ["a"] * 10_001}, "input", "input has 10001 texts; at most 10000"),
        ("embeddings", {"input": "a" * (1 << 20) + "a"}, "input", r"input\[0\] has 1048577 bytes"),
        ("embeddings", {"input": [[999]]}, "input", r"input\[0\] has token id 999; 'embedder' has ids 0 to 319"),
        ("embeddings", {"input": LONG}, "input", r"input\[0\] has \d+ tokens; the model takes 96"),
        ("embeddings", {"input": "a", "dimensions": 0}, "dimensions", "dimensions is 0"),
        ("embeddings", {"input": "a", "dimensions": 20}, "dimensions", "vectors of 'embedder' have 48 and may be cut"),
        ("embeddings", {"input": "a", "prompt_name": "x"}, "prompt_name", "'embedder' has the prompts 'query'"),
        ("embeddings", {"input": "a", "encoding_format": "int8"}, "encoding_format", "there are float, base64"),
        ("embeddings", {"model": "reranker", "input": "a"}, "model", "cannot embed; it can rerank"),
        ("rerank", {"query": "a", "documents": ["b"]}, "model", "cannot rerank; it can embed"),
        ("rerank", {"query": "a", "documents": [], "model": "reranker"}, "documents", "must be a list of texts"),
        ("rerank", {"query": "a\0", "documents": ["b"], "model": "reranker"}, "query", "query has a NUL"),
        (
            "chat/completions",
            {"messages": [{"role": "user", "content": "a"}]},
            "model",
            "cannot generate; it can embed",
        ),
        ("completions", {"prompt": "a"}, "model", "cannot generate; it can embed"),
    ],
)
def test_what_cannot_be_done_is_refused_by_name(
    served: Served, path: str, body: dict[str, object], param: str, message: str
) -> None:
    answer = served.post(f"/v1/{path}", **{"model": "embedder"} | body)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, param), error
    assert re.search(message, error["message"].replace('"', "'")), error


def test_a_text_that_is_too_long_is_cut_on_request(served: Served) -> None:
    answer = served.post("/v1/embeddings", model="embedder", input=LONG, truncate=True).json()
    expected = served.embedder.embed([LONG], truncate=True)[0]
    assert close(np.array(answer["data"][0]["embedding"], dtype=np.float32), expected)
    assert answer["usage"]["prompt_tokens"] == 96


def test_fields_of_another_kind_are_refused(served: Served) -> None:
    with Client(served.store_url) as client:
        for fields, message in (
            ({"kind": "embed", "input": ["a"], "temperature": 1.0}, "temperature does not go with kind embed"),
            ({"kind": "embed", "input": ["a"], "prompt": "b"}, "prompt does not go with kind embed"),
            ({"kind": "embed", "input": ["a"], "query": "b"}, "query does not go with kind embed"),
            ({"kind": "rerank", "input": ["a"]}, "query is missing"),
            ({"prompt": "a", "input": ["a"]}, "input goes with kind embed, rerank, classify or token_classify"),
            ({"prompt": "a", "threshold": 0.5}, "threshold goes with kind token_classify"),
            ({"kind": "token_classify", "input": [[5]]}, "input has token ids; parts of texts are labelled"),
        ):
            with pytest.raises(InvalidTask, match=message):
                client.submit(model="embedder", **fields)
