"""The bundled models: folders that transformers loads unchanged, small, with one tokenizer, and really trained.

Perplexity is measured on this machine's own standard library, on files held out by name, so the
bounds leave room for other Python versions than the one that they were trained on.
"""

import json
import math
from collections import Counter
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

from infra.models.folder import read_folder
from infra.models.recipes import RECIPES
from infra.models.tokenizer import SPECIAL_TOKENS, chat_text
from workers.library.corpus import SourceFile, standard_library

MODELS = Path(__file__).parents[2] / "workers" / "models"
FOLDER = MODELS / "tiny"
NAMES = [path.parent.name for path in sorted(MODELS.glob("*/config.json"))]
FILES = {
    "README.md",
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
}
#: Perplexity on the windows below, here; what it is on the whole held-out text stands in each README.
BOUNDS = {"tiny": 40, "tiny-v2": 40, "tiny-draft": 90}
WINDOW = 512
WINDOWS = 8


@pytest.fixture(scope="module", autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def loaded():
    """Each name's model as transformers loads it, and its report of that."""
    options = {"dtype": torch.float32, "output_loading_info": True}
    return {name: AutoModelForCausalLM.from_pretrained(MODELS / name, **options) for name in NAMES}


@pytest.fixture(scope="module")
def models(loaded):
    return {name: model.eval() for name, (model, _) in loaded.items()}


@pytest.fixture(scope="module")
def model(models):
    return models["tiny"]


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


@pytest.fixture(scope="module")
def losses(models, held_out_windows) -> dict[str, float]:
    """Each name's mean loss on these windows."""
    return {name: mean_loss(model, held_out_windows) for name, model in models.items()}


def mean_loss(model: torch.nn.Module, windows: torch.Tensor) -> float:
    with torch.inference_mode():
        logits = model(windows[:, :-1]).logits
    return float(torch.nn.functional.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten()))


def test_all_are_there_and_small():
    assert set(NAMES) == RECIPES.keys()
    sizes = {name: sum(path.stat().st_size for path in (MODELS / name).iterdir()) for name in NAMES}
    assert sizes["tiny"] <= 3_600_000
    assert sizes["tiny-draft"] <= 500_000
    assert sizes["tiny-v2"] <= 4_000_000
    assert sum(sizes.values()) <= 8_000_000


@pytest.mark.parametrize("name", NAMES)
def test_a_folder_has_what_a_model_needs_and_nothing_else(name):
    assert {path.name for path in (MODELS / name).iterdir()} == FILES
    assert f"# {name}: " in (MODELS / name / "README.md").read_text()


@pytest.mark.parametrize("name", NAMES)
def test_all_have_one_tokenizer_and_template(name):
    for file in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        assert (MODELS / name / file).read_bytes() == (FOLDER / file).read_bytes()


@pytest.mark.parametrize("name", NAMES)
def test_weights_are_bf16_and_finite(name):
    with safe_open(MODELS / name / "model.safetensors", "pt") as file:
        for key in file.keys():  # noqa: SIM118 - a safetensors file is no mapping
            tensor = file.get_tensor(key)
            assert tensor.dtype == torch.bfloat16, key
            assert tensor.isfinite().all(), key


@pytest.mark.parametrize("name", NAMES)
def test_transformers_takes_every_tensor_and_misses_none(loaded, name):
    _, info = loaded[name]
    assert not info["unexpected_keys"]
    assert set(info["missing_keys"]) <= {"lm_head.weight"}
    assert not info["mismatched_keys"]


@pytest.mark.parametrize("name", NAMES)
def test_transformers_computes_what_was_trained(models, name):
    ours = read_folder(MODELS / name).eval()
    assert ours.shape == RECIPES[name].shape
    tokens = torch.randint(0, 2048, (2, 300), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        torch.testing.assert_close(models[name](tokens).logits, ours(tokens), atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("name", NAMES)
def test_held_out_perplexity_is_far_below_uniform_and_unigram(models, losses, name, held_out_windows):
    assert len(held_out_windows) >= 8
    loss = losses[name]
    counts = Counter(held_out_windows.flatten().tolist())
    # The entropy of these very tokens: no unigram model, however it was fitted, can do better on them.
    best_unigram = -sum(n * math.log(n / counts.total()) for n in counts.values()) / counts.total()
    assert loss < best_unigram - 1.0
    assert loss < math.log(models[name].config.vocab_size) - 2.5
    assert math.exp(loss) < BOUNDS[name]


def test_a_larger_or_longer_trained_model_is_clearly_better(losses):
    assert losses["tiny"] < losses["tiny-draft"] - 0.4
    assert losses["tiny-v2"] < losses["tiny"] - 0.1


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
