"""Entities are those of transformers' token-classification pipeline, of folders as they are."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest

from engine import EngineConfig, PoolingEngine
from engine.labels import Aggregation, Entity
from tests.engine.random_encoders import ENCODERS
from tests.engine.sentence_folders import TEXTS, write_encoder_with_tokenizer
from tests.exhaustive import few
from tests.parity.conftest import transformers  # noqa: F401  (skips without it)

#: Of words alone and in rows, cut into tokens and not; with what the vocabulary lacks, and a character of two units.
SHORT = [*TEXTS[:4], "The queue is long 数字 turbines?", "rains", "𝄞 rain, penstocks and workers"]
LABELS = ["O", "B-PER", "I-PER", "B-geo-loc", "I-geo-loc", "misc-other", "DATE"]
AGGREGATIONS: list[Aggregation] = ["none", "simple", "first", "average", "max"]


def write_byte_level(folder: Path) -> None:
    """Replace a folder's tokenizer by RoBERTa's kind, whose vocabulary does not say which tokens begin a word."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    special = ["<s>", "</s>", "<unk>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=320, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator(TEXTS * 3, trainer)
    backend.post_processor = processors.RobertaProcessing(("</s>", 2), ("<s>", 0))
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token="</s>", unk_token="<unk>", model_max_length=96
    )
    tokenizer.save_pretrained(folder)


def pipeline_of(folder: Path) -> Any:
    from transformers import AutoModelForTokenClassification, AutoTokenizer, pipeline

    model = AutoModelForTokenClassification.from_pretrained(folder).float().eval()
    return pipeline("token-classification", model=model, tokenizer=AutoTokenizer.from_pretrained(folder), device="cpu")


def expected_of(pipeline: Any, text: str, aggregation: str) -> list[Entity]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # some vocabularies do not say where words begin
        entities = pipeline(text, aggregation_strategy=aggregation)
    name = "entity" if aggregation == "none" else "entity_group"
    return [Entity(each[name], float(each["score"]), each["start"], each["end"]) for each in entities]


@pytest.mark.parametrize("name", few(ENCODERS, "bert", "roberta", "modernbert"))
def test_entities_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    """With vocabularies that say which tokens begin a word, and such that do not."""
    write_encoder_with_tokenizer(tmp_path, name, "ForTokenClassification", id2label=dict(enumerate(LABELS)))
    if ENCODERS[name][1].get("pad_token_id") == 1:
        write_byte_level(tmp_path)
    truth = pipeline_of(tmp_path)
    with PoolingEngine.load(tmp_path, EngineConfig(dtype="float32", threads=1)) as engine:
        assert engine.kind == "token_classify"
        for aggregation in AGGREGATIONS:
            answers = engine.classify_tokens(SHORT, aggregation=aggregation)
            for text, entities in zip(SHORT, answers, strict=True):
                expected = expected_of(truth, text, aggregation)
                assert [(e.label, e.start, e.end) for e in entities] == [(e.label, e.start, e.end) for e in expected]
                assert [e.score for e in entities] == pytest.approx([e.score for e in expected], abs=1e-5)
            assert any(answers)
