"""To the bit: neither neighbours, nor the place among them, nor cuts of a prompt change a row's logits."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.models import load_model
from tests.engine.deterministic.logits import LONGEST, MODELS, NATIVE, SLOTS, Steps, deterministic
from tests.engine.random_models import FAMILIES, VARIANTS, write_model
from tests.histories import examples

LONG = [(7 * i + i * i // 11) % 300 + 5 for i in range(LONGEST)]


def folder_of(name: str, where: Path, **more: object) -> Path:
    return write_model(where / name, seed=3, **((VARIANTS | FAMILIES)[name] | more))


@pytest.fixture(scope="module", params=MODELS)
def steps(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Steps:
    return Steps(deterministic(folder_of(request.param, tmp_path_factory.mktemp("models"))))


def test_every_cut_of_a_short_prompt(steps: Steps) -> None:
    whole = steps.by_cuts(5, LONG[:21], ())
    for cut in range(1, 21):
        assert torch.equal(steps.by_cuts(9, LONG[:21], (cut,)), whole)
    assert torch.equal(steps.by_cuts(0, LONG[:21], range(1, 21)), whole)


def test_cuts_of_a_prompt_of_several_chunks(steps: Steps) -> None:
    prompt = LONG[:300]
    whole = steps.by_cuts(5, prompt, ())
    for cuts in [(127,), (128,), (129, 130), (1, 2, 299), (64, 128, 192, 256), (298, 299)]:
        assert torch.equal(steps.by_cuts(9, prompt, cuts), whole), cuts


def test_decoding_beside_any_number_of_others(steps: Steps) -> None:
    prompt = LONG[:137]
    alone = steps.by_cuts(63, prompt, (136,))
    own = steps.begin(63, prompt)
    others = [steps.begin(slot, LONG[slot : slot + 20 + 3 * slot]) for slot in range(SLOTS - 1)]
    steps.step((own, 0, 136), *[(one, 0, len(one.tokens) - 1) for one in others])
    for count in (1, 2, 3, 5, 8, 13, 16, 21, 33, 47, 64):
        beside = [(one, len(one.tokens) - 1, len(one.tokens)) for one in others[: count - 1]]
        place = count // 3
        found = steps.step(*beside[:place], (own, 136, 137), *beside[place:])
        assert torch.equal(found[place], alone), count


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(("gqa", "bfloat16"), marks=[NATIVE, pytest.mark.exhaustive]),
        pytest.param(("gemma2", "float32"), marks=[NATIVE, pytest.mark.exhaustive]),
        pytest.param(("mistral-window", "bfloat16"), marks=NATIVE),
    ],
    ids="-".join,
)
def some(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Steps:
    name, dtype = request.param
    return Steps(deterministic(folder_of(name, tmp_path_factory.mktemp("models")), dtype))


def test_every_number_of_others(some: Steps) -> None:
    prompt = LONG[:40]
    alone = some.by_cuts(63, prompt, (39,))
    own = some.begin(63, prompt)
    others = [some.begin(slot, LONG[slot : slot + 8 + slot]) for slot in range(SLOTS - 1)]
    some.step((own, 0, 39), *[(one, 0, len(one.tokens) - 1) for one in others])
    for count in range(1, 65):
        beside = [(one, len(one.tokens) - 1, len(one.tokens)) for one in others[: count - 1]]
        assert torch.equal(some.step(*beside, (own, 39, 40))[-1], alone), count


@settings(max_examples=examples(5, 15), deadline=None)
@given(data=st.data())
def test_any_cuts_beside_any_others(some: Steps, data: st.DataObject) -> None:
    length = data.draw(st.integers(2, LONGEST))
    cuts = sorted(data.draw(st.sets(st.integers(1, length - 1), max_size=6)))
    whole = some.by_cuts(40, LONG[:length], ())
    own = some.begin(41, LONG[:length])
    for start, end in zip([0, *cuts], [*cuts, length], strict=True):
        lengths = data.draw(st.lists(st.integers(1, 150), max_size=5))
        parts = [(some.begin(slot, LONG[-n:]), 0, n) for slot, n in enumerate(lengths)]
        place = data.draw(st.integers(0, len(parts)))
        found = some.step(*parts[:place], (own, start, end), *parts[place:])
    assert torch.equal(found[place], whole)


@NATIVE
def test_two_threads_agree_with_one(tmp_path: Path) -> None:
    folder = folder_of("gqa", tmp_path)
    prompts = [LONG[i : i + 30 + 5 * i] for i in range(4)]
    found = []
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            steps = Steps(deterministic(folder))
            together = steps.step(*[(steps.begin(i, p), 0, len(p)) for i, p in enumerate(prompts)])
            alone = [steps.by_cuts(20, prompt, (3,)) for prompt in prompts]
            assert all(map(torch.equal, together, alone))
            found.append(together)
    finally:
        torch.set_num_threads(1)
    assert torch.equal(*found)


def test_the_ordinary_mode_of_torchs_kernels_does_depend_on_neighbours_and_cuts(tmp_path: Path) -> None:
    """Else these tests could not fail."""
    steps = Steps(load_model(folder_of("gqa", tmp_path), "float32", torch.device("cpu"), "cpu"))
    whole = steps.by_cuts(5, LONG[:100], ())
    assert not all(torch.equal(steps.by_cuts(9, LONG[:100], (cut,)), whole) for cut in (1, 50, 99))
