"""The requests that a bench sends, and their times."""

from __future__ import annotations

import itertools
import statistics
from dataclasses import replace
from pathlib import Path

import pytest

from workers.trials.bench.load import Load, read_prompts

LOAD = Load("m", vocab_size=500, requests=4000)


def test_a_load_is_the_same_each_time_and_another_with_another_seed() -> None:
    load = replace(LOAD, requests=50, rate=3.0, spread=0.5, tiers={"default": 1, "batch": 1})
    assert list(load.schedule()) == list(load.schedule())
    assert list(load.schedule()) != list(replace(load, seed=1).schedule())


def test_prompts_do_not_depend_on_the_rate_nor_times_on_the_prompts() -> None:
    slow, fast = (list(replace(LOAD, requests=50, rate=rate).schedule()) for rate in (1.0, 10.0))
    assert [ask.task for ask in slow] == [ask.task for ask in fast]
    longer = list(replace(LOAD, requests=50, rate=1.0, prompt_tokens=300).schedule())
    assert [ask.due for ask in longer] == [ask.due for ask in slow]


@pytest.mark.parametrize(("burstiness", "variation"), [(1.0, 1.0), (0.25, 2.0), (4.0, 0.5)])
def test_arrivals_come_at_the_rate_and_vary_as_they_are_told_to(burstiness: float, variation: float) -> None:
    due = [0.0, *(ask.due for ask in replace(LOAD, rate=20.0, burstiness=burstiness).schedule())]
    gaps = [later - earlier for earlier, later in itertools.pairwise(due)]
    assert statistics.mean(gaps) == pytest.approx(1 / 20, rel=0.15)
    # A gamma distribution of shape k has a standard deviation of 1 / sqrt(k) of its mean.
    assert statistics.stdev(gaps) / statistics.mean(gaps) == pytest.approx(variation, rel=0.1)


def test_a_closed_loop_has_no_times() -> None:
    assert {ask.due for ask in LOAD.schedule()} == {0.0}


def test_lengths_keep_within_their_spread() -> None:
    requests = list(replace(LOAD, prompt_tokens=100, output_tokens=40, spread=0.5).schedule())
    prompts, outputs = [len(ask.task["prompt"]) for ask in requests], [ask.task["max_tokens"] for ask in requests]
    assert (min(prompts), max(prompts)) == (50, 150)
    assert (min(outputs), max(outputs)) == (20, 60)
    assert statistics.mean(prompts) == pytest.approx(100, rel=0.03)
    assert all(ask.task["ignore_eos"] for ask in requests)


def test_random_prompts_are_tokens_of_the_model_with_a_common_beginning() -> None:
    requests = list(replace(LOAD, requests=40, prompt_tokens=64, shared_prefix=16).schedule())
    prompts = [ask.task["prompt"] for ask in requests]
    assert {len(prompt) for prompt in prompts} == {64}
    assert len({tuple(prompt[:16]) for prompt in prompts}) == 1
    assert len({tuple(prompt[16:24]) for prompt in prompts}) == 40
    assert 0 <= min(map(min, prompts)) < max(map(max, prompts)) < 500


def test_tiers_come_by_their_weights() -> None:
    requests = list(replace(LOAD, tiers={"priority": 1, "batch": 3}).schedule())
    share = sum(ask.task["tier"] == "batch" for ask in requests) / len(requests)
    assert share == pytest.approx(0.75, abs=0.03)


def test_given_prompts_come_each_as_often_and_with_their_own_lengths() -> None:
    given = [{"prompt": "a"}, {"prompt": "b", "max_tokens": 3}, {"prompt": [1, 2]}]
    requests = list(replace(LOAD, requests=9, prompts=given, extra={"temperature": 0}).schedule())
    assert sorted(str(ask.task["prompt"]) for ask in requests) == sorted(["a", "b", "[1, 2]"] * 3)
    assert {ask.task["max_tokens"] for ask in requests if ask.task["prompt"] == "b"} == {3}
    assert all(ask.task["temperature"] == 0 and "ignore_eos" not in ask.task for ask in requests)


class TestFile:
    def test_of_lines_and_objects(self, tmp_path: Path) -> None:
        file = tmp_path / "prompts"
        file.write_text('one\n\n{"prompt": "two", "max_tokens": 5}\n{"prompt": [1]}\n')
        assert read_prompts(file) == [{"prompt": "one"}, {"prompt": "two", "max_tokens": 5}, {"prompt": [1]}]

    @pytest.mark.parametrize(
        ("text", "says"),
        [
            ("", "has no prompt"),
            ("a\n{\n", "line 2"),
            ('{"text": "a"}', "line 1: an object has `prompt`"),
            ('{"prompt": "a", "n": 2}', "nothing else"),
        ],
    )
    def test_that_cannot_be_used_is_refused(self, tmp_path: Path, text: str, says: str) -> None:
        (tmp_path / "prompts").write_text(text)
        with pytest.raises(ValueError, match=says):
            read_prompts(tmp_path / "prompts")
