"""Tasks that generate nothing, as a worker gives them to its engine."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine import PoolingEngine, RequestError
from engine.errors import TextError
from engine.request import Event, Request
from engine.text.tokenizer import EncodedText
from producers.contract.task import Task
from tests.engine.sentence_folders import TEXTS, write_encoder_with_tokenizer
from tests.stub_embedder import StubEmbedder, StubTexts
from tests.stub_engine import StubEngine
from tests.waiting import PATIENCE_S
from workers.errors import Refused
from workers.flow.claimer import pooled
from workers.flow.probe import check_model

pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "reranker"
    write_encoder_with_tokenizer(folder, "bert", "ForSequenceClassification", num_labels=1)
    return folder


@pytest.fixture
def engine(folder: Path) -> Iterator[PoolingEngine]:
    with PoolingEngine.load(folder) as engine:
        yield engine


def test_pairs_are_cut_on_request_and_say_where_the_second_text_begins(engine: PoolingEngine) -> None:
    documents = [TEXTS[1], TEXTS[4] * 3]
    task = Task(model="m", kind="rerank", query=TEXTS[0], input=documents, truncate=True)
    ids, pooling = pooled(task, engine)
    assert engine.tokenizer is not None
    query = len(engine.tokenizer.encode(TEXTS[0]))
    assert pooling.lengths == (len(engine.tokenizer.encode_pair(TEXTS[0], TEXTS[1]).ids), 96)
    assert pooling.seconds == (query, query)
    assert sum(pooling.lengths) == len(ids)
    with pytest.raises(RequestError, match=r"input\[1\] has \d+ tokens; the model takes 96") as refusal:
        pooled(task.model_copy(update={"truncate": False}), engine)
    assert (refusal.value.code, refusal.value.param) == ("context_length_exceeded", "input")


def test_a_text_without_tokens_fails_itself_alone_if_its_request_says_so() -> None:
    """Some tokenizers make nothing of white space."""

    class Stripping(StubTexts):
        def encoded(self, text: str | list[int], truncate: bool, second: str | None = None) -> EncodedText:
            return super().encoded(text.strip() if isinstance(text, str) else text, truncate, second)

    engine = StubEmbedder()
    engine.texts = Stripping()
    task = Task(model="m", kind="embed", input=("ab", " "), on_error="item")
    ids, pooling = pooled(task, engine)
    assert (ids, pooling.lengths) == ([97, 98], (2, 0))
    assert pooling.errors[1].code == "empty_prompt"
    with pytest.raises(RequestError, match=r"input\[1\] has no tokens") as refusal:
        pooled(task.model_copy(update={"on_error": "request"}), engine)
    assert (refusal.value.code, refusal.value.param) == ("empty_prompt", "input")


def test_a_text_of_too_many_parts_fails_itself_alone_if_its_request_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_encoder_with_tokenizer(tmp_path / "tagger", "bert", "ForTokenClassification", num_labels=3)
    monkeypatch.setattr("engine.pooling.entities.MAX_ENTITIES", 1)
    task = Task(model="m", kind="token_classify", input=("a", TEXTS[0], "b"), aggregation_strategy="none")
    ends = []
    with PoolingEngine.load(tmp_path / "tagger") as engine:
        for on_error in ("item", "request"):
            done = threading.Event()
            ids, pooling = pooled(task.model_copy(update={"on_error": on_error}), engine)

            def take(event: Event, done: threading.Event = done) -> None:
                ends.append(event)
                done.set()

            engine.submit(Request(on_error, ids, pooling=pooling), take)
            assert done.wait(PATIENCE_S)
    item, request = ends
    assert item.rows is not None
    bad = [row if isinstance(row, TextError) else None for row in item.rows]
    assert (bad[0], bad[2]) == (None, None)
    assert bad[1] is not None
    assert re.fullmatch(r"the text has \d+ labelled parts, more than 1; give a higher threshold", bad[1].message)
    assert (request.rows, request.refused, request.param) == (None, True, "input")
    assert re.match(r"input\[1\] has \d+ labelled parts", request.error or "")


def test_what_the_engine_does_not_make_is_refused(engine: PoolingEngine) -> None:
    """A gateway refuses it by the model's card; a task may have been queued for another version."""
    for other in (engine, StubEngine()):
        with pytest.raises(RequestError, match="the model cannot embed"):
            pooled(Task(model="m", kind="embed", input=["a"]), other)


def test_a_model_whose_weights_are_damaged_is_refused(folder: Path, engine: PoolingEngine, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    check_model(engine, "model", 60)
    damaged = tmp_path / "damaged"
    damaged.mkdir()
    for path in folder.iterdir():
        (damaged / path.name).write_bytes(path.read_bytes())
    weights = load_file(folder / "model.safetensors")
    weights["classifier.weight"] += float("nan")
    save_file(weights, damaged / "model.safetensors")
    with PoolingEngine.load(damaged) as broken, pytest.raises(Refused, match="not finite"):
        check_model(broken, "model", 60)
