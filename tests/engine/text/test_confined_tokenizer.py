"""A tokenizer in its own process: the same tokens as in this one, and no way to hold it up."""

from __future__ import annotations

import json
import threading

import pytest

from engine.confined import Limits, Stopped
from engine.text import Tokenizer
from engine.text.confined_tokenizer import ConfinedTokenizer, TextError

TEXTS = ["", "def f(x):\n    return x\n" * 50, "a\ud800é🗼", "<think> ｜é"]


@pytest.fixture
def confine():
    """Makes confined tokenizers, with limits of processor time alone."""
    made = []

    def make(state, **limits):
        limits = {"cpu": 20.0, "wall": 100.0, "memory": 1 << 30, **limits}
        made.append(ConfinedTokenizer(state.encode(), Limits(**limits)))
        return made[-1]

    yield make
    for one in made:
        one.close()


def test_it_gives_what_the_tokenizer_gives(confine, byte_level, byte_fallback):
    for state in (byte_level.to_str(), byte_fallback.to_str()):
        here, there = Tokenizer({"tokenizer.json": state.encode()}), confine(state)
        for special in (True, False):
            assert there.encode_all(TEXTS, special) == [tuple(here.encode(text, special)) for text in TEXTS]
        ids = [here.encode(text) for text in TEXTS]
        assert there.decode_all(ids) == [here.decode(one) for one in ids]


#: Seconds of work.
MUCH = ["def f(x): return x\n" * 50_000] * 40


def test_texts_that_take_too_long_are_ended_and_the_next_ones_are_read(confine, byte_level):
    there = confine(byte_level.to_str(), cpu=1.0)
    with pytest.raises(Stopped, match=r"1 s of processor time"):
        there.encode_all(MUCH, False)
    assert there.decode_all(there.encode_all(["def f"], False)) == ["def f"]


def test_a_call_that_is_killed_ends(confine, byte_level):
    there = confine(byte_level.to_str(), cpu=100.0)
    over = threading.Event()
    killing = threading.Thread(target=lambda: [there.kill() for _ in iter(lambda: over.wait(0.1), True)])
    killing.start()
    with pytest.raises(Stopped, match=r"its process ended with status -9|it was killed"):
        there.encode_all(MUCH, False)
    over.set()
    killing.join()


def test_an_error_names_its_text(confine, byte_level):
    state = json.loads(byte_level.to_str())
    pattern = {"Regex": "(a+)+$"}  # backtracks until the library gives up
    state["pre_tokenizer"] = {"type": "Split", "pattern": pattern, "behavior": "Isolated", "invert": False}
    with pytest.raises(TextError, match="fails on this text") as error:
        confine(json.dumps(state)).encode_all(["b", "a" * 300 + "!", "c"], True)
    assert (error.value.at, error.value.code, error.value.param) == (1, "invalid_value", "prompt")
