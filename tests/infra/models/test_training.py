"""How the bundled models are trained."""

import dataclasses
import random
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

from infra.models.chat import chat_pairs
from infra.models.folder import read_folder, write_folder
from infra.models.grow import widened
from infra.models.llama import Llama, Shape
from infra.models.measure import held_out_loss
from infra.models.muon import orthogonal
from infra.models.recipes import RECIPES, Recipe
from infra.models.train import Checkpoint, batches, documents, train
from workers.library.corpus import SourceFile, standard_library

pytestmark = pytest.mark.exhaustive

TINY = Path(__file__).parents[3] / "workers" / "models" / "tiny"
SHAPE = Shape(hidden_size=32, intermediate_size=48, layers=1, heads=2, kv_heads=1, head_dim=16, context=256)
RECIPE = dataclasses.replace(RECIPES["tiny-draft"], shape=SHAPE, steps=10, warm_up=2)


@pytest.fixture(scope="module", autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(TINY / "tokenizer.json"))


@pytest.fixture(scope="module")
def library() -> list[SourceFile]:
    return standard_library()


@pytest.fixture(scope="module")
def texts(library, tokenizer) -> list[torch.Tensor]:
    return documents([file for file in library if not file.held_out and len(file.text) < 3000][:20], tokenizer, seed=0)


def fresh(shape: Shape = SHAPE) -> Llama:
    torch.manual_seed(0)
    return Llama(shape)


def weights(model: Llama) -> torch.Tensor:
    return torch.cat([value.flatten() for value in model.state_dict().values()])


def test_held_out_files_are_a_twentieth_and_known_by_name_alone(library):
    held_out = [file for file in library if file.held_out]
    assert 0.02 < len(held_out) / len(library) < 0.1
    assert SourceFile("http/client.py", "").held_out
    assert not SourceFile("os.py", "").held_out


def test_training_text_leaves_tests_tables_and_installed_packages_out(tmp_path):
    text = "# a line of source\n" * 20
    for name in ["os.py", "json/decoder.py", "test/test_os.py", "site-packages/x.py", "encodings/cp1252.py"]:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    (tmp_path / "latin.py").write_bytes(b"# \xe9t\xe9\n" * 100)
    (tmp_path / "empty.py").write_text("")
    assert [file.name for file in standard_library(tmp_path)] == ["json/decoder.py", "os.py"]


def test_no_sources_is_an_error_that_says_where(tmp_path):
    with pytest.raises(FileNotFoundError, match=str(tmp_path)):
        standard_library(tmp_path)


def test_chat_pairs_ask_by_docstring_and_answer_by_source():
    source = '''\
"""Tools for
lines."""


class A:
    def first(self, n=1):
        """Return the first."""
        return n
'''
    file = SourceFile("pkg/lines.py", source)
    seen = [pair for seed in range(30) for pair in chat_pairs(file, random.Random(seed))]
    answers = {pair.assistant for pair in seen}
    assert answers == {
        "Tools for\nlines.",
        'def first(self, n=1):\n    """Return the first."""\n    return n',
        "Return the first.",
    }
    assert any(pair.user == "Write the function first(self, n=1)." for pair in seen)
    assert all("pkg.lines" in pair.user for pair in seen if pair.assistant.startswith("Tools"))


def test_orthogonal_leaves_singular_values_near_one():
    matrices = torch.randn(3, 48, 32, generator=torch.Generator().manual_seed(0))
    for batch in (matrices, matrices.mT):
        values = torch.linalg.svdvals(orthogonal(batch))
        assert values.min() > 0.5
        assert values.max() < 1.3


def test_training_learns_and_repeats_itself(texts):
    windows = next(batches(texts, 2048, 128, torch.Generator().manual_seed(1)))[:8]
    losses = []
    for _ in range(2):
        network = fresh()
        untrained = network.loss(windows).item()
        train(network, texts, RECIPE, steps=6, seed=0)
        losses.append(network.loss(windows).item())
    assert losses[0] == losses[1]
    assert losses[0] < untrained - 0.2


def test_a_folder_is_read_as_it_was_written_here_and_by_transformers(tmp_path, texts, tokenizer):
    network = fresh()
    train(network, texts, RECIPE, steps=2, seed=0)
    write_folder(tmp_path / "small", network, tokenizer, "a card")
    windows = next(batches(texts, 2048, 128, torch.Generator().manual_seed(1)))[:4]
    again = read_folder(tmp_path / "small")
    assert again.shape == SHAPE
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "small", dtype=torch.float32)
    with torch.inference_mode():
        assert again.loss(windows).item() == pytest.approx(network.loss(windows).item(), abs=0.02)
        torch.testing.assert_close(loaded(windows).logits, again(windows), atol=2e-4, rtol=1e-4)
    assert AutoTokenizer.from_pretrained(tmp_path / "small").model_max_length == SHAPE.context


def stopped(monkeypatch, checkpoint: Checkpoint, texts, steps: int, after: int) -> None:
    """A run that is saved once, then ends."""
    monkeypatch.setattr("infra.models.train._SAVE_EVERY", after)
    save = Checkpoint.save

    def end(self: Checkpoint, content: dict) -> None:
        save(self, content)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Checkpoint, "save", end)
        with pytest.raises(KeyboardInterrupt):
            train(fresh(), texts, RECIPE, steps, seed=0, checkpoint=checkpoint)


def test_a_run_that_was_stopped_goes_on_as_if_it_had_not(tmp_path, texts, monkeypatch):
    whole, halves = fresh(), fresh()
    train(whole, texts, RECIPE, steps=10, seed=0)
    checkpoint = Checkpoint(tmp_path / "run.pt")
    stopped(monkeypatch, checkpoint, texts, steps=10, after=8)  # while the rate falls, and windows are long
    train(halves, texts, RECIPE, steps=10, seed=0, checkpoint=checkpoint)
    assert torch.equal(weights(whole), weights(halves))


def test_a_run_may_be_made_longer_or_shorter_while_its_rate_is_constant(tmp_path, texts, monkeypatch):
    checkpoint = Checkpoint(tmp_path / "run.pt")
    stopped(monkeypatch, checkpoint, texts, steps=20, after=4)
    shorter, straight = fresh(), fresh()
    train(shorter, texts, RECIPE, steps=8, seed=0, checkpoint=checkpoint)
    train(straight, texts, RECIPE, steps=8, seed=0)
    assert torch.equal(weights(shorter), weights(straight))


def test_a_run_that_went_another_way_is_refused(tmp_path, texts, monkeypatch):
    checkpoint = Checkpoint(tmp_path / "run.pt")
    stopped(monkeypatch, checkpoint, texts, steps=10, after=8)
    with pytest.raises(ValueError, match="at step 8 of 10: a run of 20 steps parts from it at step 6"):
        train(fresh(), texts, RECIPE, steps=20, seed=0, checkpoint=checkpoint)


@pytest.mark.parametrize("name", RECIPES)
def test_rates_rise_to_their_peak_and_fall_to_nothing(name):
    recipe: Recipe = RECIPES[name]
    rates = [recipe.rate(step, recipe.steps) for step in range(recipe.steps)]
    assert rates[: recipe.warm_up // 2] == sorted(rates[: recipe.warm_up // 2])
    assert max(rates) > 0.99
    assert rates[-1] < 0.001
    top = rates.index(max(rates))
    assert rates[top:] == sorted(rates[top:], reverse=True)


def test_a_wider_network_computes_what_it_did(tokenizer):
    small = fresh()
    wide = widened(small, dataclasses.replace(SHAPE, intermediate_size=80))
    tokens = torch.randint(0, 2048, (2, 64), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        torch.testing.assert_close(wide(tokens), small(tokens))
    assert wide.loss(tokens).isfinite()


@pytest.mark.parametrize("change", [{"intermediate_size": 32}, {"layers": 2}, {"hidden_size": 64}])
def test_a_network_grows_in_no_other_way(change):
    with pytest.raises(ValueError, match="only intermediate_size may change, and only upwards"):
        widened(fresh(), dataclasses.replace(SHAPE, **change))


def test_held_out_loss_is_that_of_every_token_once(tokenizer):
    network = fresh()
    file = SourceFile("x.py", "import os\n" * 400)
    ids = torch.tensor([0, *tokenizer.encode(file.text, add_special_tokens=False).ids])
    assert len(ids) > 2 * SHAPE.context
    found = held_out_loss(network, [file], tokenizer)
    nats = 0.0
    with torch.inference_mode():
        for start in range(0, len(ids) - 1, SHAPE.context):
            window = ids[start : start + SHAPE.context + 1][None]
            logits = network(window[:, :-1])
            nats += float(torch.nn.functional.cross_entropy(logits[0], window[0, 1:], reduction="sum"))
    assert (found.files, found.tokens, found.text_bytes) == (1, len(ids) - 1, len(file.text))
    assert found.loss == pytest.approx(nats / found.tokens, rel=1e-5)
