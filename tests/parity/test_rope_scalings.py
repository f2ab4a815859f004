"""Every kind of rope scaling: its numbers are those of transformers' functions, and so is what a model says by them."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.models import load_model
from engine.models.settings import RopeSettings
from engine.text.config import Config
from tests.engine.random_models import BASE, LLAMA3_SCALING, write_model
from tests.exhaustive import few
from tests.parity.conftest import Truth, transformers
from tests.parity.driver import Driver, greedy, prompts_of

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0 + i / 10 for i in range(8)],
    "long_factor": [1.5 + i for i in range(8)],
    "original_max_position_embeddings": 64,
}
KINDS: dict[str, dict[str, Any]] = {
    "linear": {"rope_type": "linear", "factor": 4.0},
    "linear-old": {"type": "linear", "factor": 2.5},
    "llama3": LLAMA3_SCALING,
    "yarn": YARN,
    "yarn-betas": YARN | {"beta_fast": 16, "beta_slow": 2, "truncate": False},
    "yarn-factor": YARN | {"attention_factor": 0.7},
    "yarn-mscale": YARN | {"mscale": 0.8, "mscale_all_dim": 0.5},
    "yarn-small": {"rope_type": "yarn", "factor": 1.0},
    "longrope": LONGROPE,
    "longrope-factor": LONGROPE | {"factor": 3.0},
    "longrope-attention": LONGROPE | {"attention_factor": 1.25},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
}


def peer(scaling: dict[str, Any], **changes: Any) -> Any:
    given = {key: value for key, value in BASE.items() if key not in ("architectures", "model_type", "dtype")}
    return transformers.LlamaConfig(**(given | {"rope_scaling": dict(scaling)} | changes))


def ours(scaling: dict[str, Any], **changes: Any) -> RopeSettings:
    config = Config.of_model(BASE | {"rope_scaling": scaling} | changes)
    return RopeSettings.read(config.rope(), config.integer("head_dim"))


def theirs(config: Any, seq_len: int | None = None) -> tuple[torch.Tensor, float]:
    functions = transformers.modeling_rope_utils.ROPE_INIT_FUNCTIONS
    found: tuple[torch.Tensor, float] = functions[config.rope_parameters["rope_type"]](config, "cpu", seq_len)
    return found


@pytest.mark.parametrize("theta", [10000.0, 500000.0])
@pytest.mark.parametrize("kind", list(KINDS))
def test_frequencies_and_attention_factor(kind: str, theta: float) -> None:
    rope = ours(KINDS[kind], rope_theta=theta)
    frequencies, attention_factor = theirs(peer(KINDS[kind], rope_theta=theta))
    torch.testing.assert_close(rope.scaling.frequencies(theta, 16), frequencies, rtol=1e-6, atol=0)
    assert math.isclose(rope.scaling.attention_factor, attention_factor, rel_tol=1e-9)


@pytest.mark.parametrize(("kind", "switch", "length"), [("longrope", 64, 65), ("dynamic", 512, 1024)])
def test_the_set_for_long_sequences(kind: str, switch: int, length: int) -> None:
    rope = ours(KINDS[kind])
    assert rope.scaling.switch == switch
    frequencies, _ = theirs(peer(KINDS[kind]), length)
    torch.testing.assert_close(rope.scaling.frequencies(1e4, 16, long=True), frequencies, rtol=1e-6, atol=0)
    assert not torch.allclose(frequencies, rope.scaling.frequencies(1e4, 16))


def test_heads_that_turn_in_part() -> None:
    scaling = YARN | {"partial_rotary_factor": 0.5}
    rope = ours(scaling)
    assert rope.rotary_dim == 8
    frequencies, _ = theirs(peer(scaling))
    torch.testing.assert_close(rope.scaling.frequencies(1e4, 8), frequencies, rtol=1e-6, atol=0)


@pytest.mark.parametrize(
    ("scaling", "context"),
    [
        ({"rope_type": "dynamic", "factor": 2.5}, 1280),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}, 2048),
        (YARN, 512),  # 4 * 64 is less than what the model says of itself
        ({"rope_type": "linear", "factor": 8.0}, 512),
    ],
)
def test_the_context_is_what_a_scaling_was_set_for(scaling: dict[str, Any], context: int) -> None:
    assert Config.of_model(BASE | {"rope_scaling": scaling}).context_length() == context


@pytest.mark.parametrize("kind", few(["linear", "yarn", "yarn-betas", "longrope"], "yarn"))
def test_a_models_output(kind: str, tmp_path: Path) -> None:
    write_model(tmp_path, tokenizer=False, rope_scaling=KINDS[kind])
    truth, model = Truth(tmp_path), load_model(tmp_path, "auto", torch.device("cpu"))
    driver = Driver(model, tokens=24)
    # Beyond 64 tokens from the beginning, on the way, and not at all.
    prompts = prompts_of([100, 58, 20], model.vocab_size)
    for i, prompt in enumerate(prompts):
        driver.add(str(i), prompt, greedy(16))
    found = driver.run()
    for i, prompt in enumerate(prompts):
        truth.check(prompt, found[str(i)])
    assert (driver.scheduler.stats().preemptions > 0) == (model.rope_switch is not None)


def test_dynamic_scaling_changes_nothing_up_to_the_models_context(tmp_path: Path) -> None:
    write_model(tmp_path, tokenizer=False, max_position_embeddings=64, rope_scaling=KINDS["dynamic"])
    truth, model = Truth(tmp_path), load_model(tmp_path, "auto", torch.device("cpu"))
    driver = Driver(model, tokens=24)
    prompt = prompts_of([40], model.vocab_size)[0]
    driver.add("a", prompt, greedy(24))
    truth.check(prompt, driver.run()["a"])


def test_dynamic_scaling_beyond_is_that_of_the_longest_sequence_whatever_the_length(tmp_path: Path) -> None:
    write_model(tmp_path / "dynamic", tokenizer=False, max_position_embeddings=64, rope_scaling=KINDS["dynamic"])
    base = 10000.0 * (2.0 * 128 / 64 - 1) ** (16 / 14)
    write_model(tmp_path / "stretched", tokenizer=False, rope_theta=base)
    truth, model = Truth(tmp_path / "stretched"), load_model(tmp_path / "dynamic", "auto", torch.device("cpu"))
    assert model.context_length == 128
    driver = Driver(model, tokens=24)
    prompts = prompts_of([70, 64, 100], model.vocab_size)
    for i, prompt in enumerate(prompts):
        driver.add(str(i), prompt, greedy(20))
    found = driver.run()
    truth.check(prompts[0], found["0"])
    truth.check(prompts[2], found["2"])
    # The first token is still that of a sequence of 64; all after it are those of longer ones.
    truth.check([*prompts[1], found["1"][0]], found["1"][1:])
