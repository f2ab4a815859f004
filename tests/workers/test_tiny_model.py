"""The bundled model: a folder that transformers loads unchanged, small, and really trained.

Perplexity is measured on this machine's own standard library, on files held out by name, so the
bounds leave room for other Python versions than the one that it was trained on.
"""

import json
import math
import random
from collections import Counter
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

from workers.models_train.corpus import SourceFile, chat_pairs, standard_library
from workers.models_train.folder import write_folder
from workers.models_train.llama import Llama, Shape
from workers.models_train.muon import orthogonal
from workers.models_train.tokenizer import SPECIAL_TOKENS, chat_text
from workers.models_train.train_tiny import batches, documents, train

FOLDER = Path(__file__).parents[2] / "workers" / "models" / "tiny"
WINDOW = 512
WINDOWS = 12


@pytest.fixture(scope="module", autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def model():
    return AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(FOLDER)


@pytest.fixture(scope="module")
def library() -> list[SourceFile]:
    return standard_library()


@pytest.fixture(scope="module")
def held_out_windows(library, tokenizer) -> torch.Tensor:
    """`[WINDOWS, WINDOW]` token ids, one window from each of the first long enough held-out files."""
    windows = []
    for file in library:
        if file.held_out:
            ids = tokenizer(file.text[: WINDOW * 8])["input_ids"]
            if len(ids) >= WINDOW:
                windows.append(ids[:WINDOW])
    return torch.tensor(windows[:WINDOWS])


def mean_loss(model: torch.nn.Module, windows: torch.Tensor) -> float:
    with torch.inference_mode():
        logits = model(windows[:, :-1]).logits
    return float(torch.nn.functional.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten()))


def test_folder_leaves_room_for_a_successor_and_a_draft_in_8_mb():
    sizes = {path.name: path.stat().st_size for path in FOLDER.iterdir()}
    assert set(sizes) == {
        "README.md",
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    whole, shared = sum(sizes.values()), sum(sizes.values()) - sizes["model.safetensors"]
    assert whole <= 3_600_000
    assert 2 * whole + sizes["model.safetensors"] / 10 + shared <= 8_000_000


def test_weights_are_bf16_and_finite():
    with safe_open(FOLDER / "model.safetensors", "pt") as file:
        for name in file.keys():  # noqa: SIM118 - a safetensors file is no mapping
            tensor = file.get_tensor(name)
            assert tensor.dtype == torch.bfloat16, name
            assert tensor.isfinite().all(), name


def test_transformers_takes_every_tensor_and_misses_none():
    _, info = AutoModelForCausalLM.from_pretrained(FOLDER, output_loading_info=True)
    assert not info["unexpected_keys"]
    assert set(info["missing_keys"]) <= {"lm_head.weight"}
    assert not info["mismatched_keys"]


def test_transformers_computes_what_was_trained(model):
    ours = Llama(Shape()).eval()
    with safe_open(FOLDER / "model.safetensors", "pt") as file:
        state = {name.removeprefix("model."): file.get_tensor(name).float() for name in file.keys()}  # noqa: SIM118
    ours.load_state_dict(state)
    tokens = torch.randint(0, 2048, (2, 300), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        torch.testing.assert_close(model(tokens).logits, ours(tokens), atol=2e-4, rtol=1e-4)


def test_held_out_perplexity_is_far_below_uniform_and_unigram(model, held_out_windows):
    assert len(held_out_windows) >= 8
    loss = mean_loss(model, held_out_windows)
    counts = Counter(held_out_windows.flatten().tolist())
    # The entropy of these very tokens: no unigram model, however it was fitted, can do better on them.
    best_unigram = -sum(n * math.log(n / counts.total()) for n in counts.values()) / counts.total()
    uniform = math.log(model.config.vocab_size)
    assert loss < best_unigram - 1.5
    assert loss < uniform - 3.0
    assert math.exp(loss) < 40


def test_perplexity_depends_on_the_order_of_the_tokens(model, held_out_windows):
    shuffled = held_out_windows[:4, torch.randperm(WINDOW, generator=torch.Generator().manual_seed(0))]
    assert mean_loss(model, shuffled) > mean_loss(model, held_out_windows[:4]) + 1.0


def test_late_positions_are_trained_too(model, tokenizer, library):
    """Loss at positions 768 to 1023 must not rise above that of the first 256: the context is real."""
    texts = [file.text for file in library if file.held_out and len(file.text) > 10_000][:6]
    windows = torch.tensor([tokenizer(text[:9000])["input_ids"][:1024] for text in texts])
    with torch.inference_mode():
        logits = model(windows[:, :-1]).logits
    losses = torch.nn.functional.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten(), reduction="none").view(
        len(windows), -1
    )
    assert losses[:, 768:].mean() < losses[:, :256].mean() + 0.3


@pytest.mark.parametrize("prompt", ["def ", "import os\n\n\nclass Reader:\n    "])
def test_continuations_are_readable_text(model, tokenizer, prompt):
    inputs = tokenizer([prompt] * 4, return_tensors="pt")
    torch.manual_seed(0)
    output = model.generate(**inputs, max_new_tokens=64, do_sample=True)
    rows = output[:, inputs["input_ids"].shape[1] :].tolist()
    text = "\n".join(tokenizer.decode(row, skip_special_tokens=True) for row in rows)
    readable = sum(c in "\n\t" or (c.isprintable() and c != "\ufffd") for c in text)
    assert readable >= 0.95 * len(text)
    assert len(set(text.split())) >= 20


def test_tokenizer_round_trips_source_and_any_unicode(tokenizer, library):
    for text in [file.text[:4000] for file in library[::40]] + ["naïve 🐍 日本語\r\n\t\x00 \u2028 end  \n"]:
        assert tokenizer.decode(tokenizer(text)["input_ids"], clean_up_tokenization_spaces=False) == text


def test_transformers_and_tokenizers_agree_on_every_id(tokenizer, library):
    raw = Tokenizer.from_file(str(FOLDER / "tokenizer.json"))
    assert raw.get_vocab_size() == 2048
    assert [raw.token_to_id(token) for token in SPECIAL_TOKENS] == [0, 1, 2, 3, 4]
    for file in library[::100]:
        text = file.text[:3000] + chat_text("", "question", "answer")
        assert tokenizer(text)["input_ids"] == raw.encode(text).ids


def test_source_text_costs_few_tokens(tokenizer, library):
    text = "".join(file.text for file in library if file.held_out)[:200_000]
    assert len(text) / len(tokenizer(text)["input_ids"]) > 2.8


def test_chat_template_renders_what_training_showed(tokenizer):
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "What is os?"},
        {"role": "assistant", "content": "OS routines."},
    ]
    rendered = tokenizer.apply_chat_template(messages, tokenize=False)
    assert rendered == "<|endoftext|>" + chat_text("Be brief.", "What is os?", "OS routines.")
    opened = tokenizer.apply_chat_template(messages[:2], tokenize=False, add_generation_prompt=True)
    assert rendered.startswith(opened)
    assert opened.endswith("<|end|>\n<|assistant|>\n")


def test_chat_template_refuses_unknown_roles(tokenizer):
    with pytest.raises(Exception, match="unknown role tool: use system, user or assistant"):
        tokenizer.apply_chat_template([{"role": "tool", "content": "x"}], tokenize=False)


def test_replies_end_with_the_end_token(model, tokenizer):
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Write the function close(self)."}], tokenize=False, add_generation_prompt=True
    )
    inputs = tokenizer([prompt] * 8, return_tensors="pt")
    torch.manual_seed(0)
    output = model.generate(**inputs, max_new_tokens=120)
    replies = output[:, inputs["input_ids"].shape[1] :].tolist()
    end = tokenizer.convert_tokens_to_ids("<|end|>")
    assert sum(end in reply for reply in replies) >= 4
    assert sum(tokenizer.decode(reply).startswith("def close(self") for reply in replies) >= 4


def test_generation_stops_at_either_end_token():
    config = json.loads((FOLDER / "generation_config.json").read_text())
    assert config["eos_token_id"] == [0, 4]
    assert 0 < config["temperature"] <= 1
    assert 0 < config["top_p"] <= 1


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


def test_training_learns_and_repeats_itself(tmp_path, library):
    raw = Tokenizer.from_file(str(FOLDER / "tokenizer.json"))
    shape = Shape(hidden_size=32, intermediate_size=48, layers=1, heads=2, kv_heads=1, head_dim=16, context=256)
    texts = documents([file for file in library if not file.held_out and len(file.text) < 3000][:20], raw, seed=0)
    windows = next(batches(texts, 128, torch.Generator().manual_seed(1)))[:8]
    losses = []
    for _ in range(2):
        torch.manual_seed(0)
        network = Llama(shape)
        untrained = network.loss(windows).item()
        train(network, texts, steps=6, seed=0)
        losses.append(network.loss(windows).item())
    assert losses[0] == losses[1]
    assert losses[0] < untrained - 0.2
    write_folder(tmp_path / "small", network, raw, "a card")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "small", dtype=torch.float32)
    assert mean_loss(loaded, windows) == pytest.approx(losses[0], abs=0.02)
    assert AutoTokenizer.from_pretrained(tmp_path / "small").model_max_length == shape.context
