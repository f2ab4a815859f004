"""Messages that know where they name a request's fields."""

from __future__ import annotations

import json
import pickle

from engine.errors import ErrorText, FieldName, fields_of, renamed

NAMES = {"n": "num", "prompt": "messages"}


def test_fields_are_renamed_and_values_are_not() -> None:
    text = ErrorText.of("{prompt} is {}; {} is {}", '"the n prompt"', FieldName("n"), "n")
    assert text == 'prompt is "the n prompt"; n is n'
    assert renamed(text, NAMES) == 'messages is "the n prompt"; num is n'


def test_braces_of_a_value_are_text() -> None:
    assert renamed(ErrorText.of("{n} is {}", "{n} {0}"), NAMES) == "num is {n} {0}"


def test_a_message_within_a_message_keeps_its_fields() -> None:
    inner = ErrorText.of("at most {prompt}")
    assert renamed(ErrorText.of("{n} must be {}", inner), NAMES) == "num must be at most messages"
    path = ErrorText.of("{input}[{}]", 3)
    assert (
        renamed(ErrorText.of("{prompt} is empty").renamed({"prompt": path}), {"input": "texts"}) == "texts[3] is empty"
    )


def test_a_plain_message_stays_as_it_is() -> None:
    assert renamed("n is 3", NAMES) == "n is 3"


def test_fields_go_through_json_and_pickle() -> None:
    text = ErrorText.of("{n} is {}, and n is {n}", 3)
    stored = json.loads(json.dumps([text, fields_of(text)]))
    assert renamed(ErrorText.read(*stored), NAMES) == "num is 3, and n is num"
    assert renamed(pickle.loads(pickle.dumps(text)), NAMES) == "num is 3, and n is num"


def test_fields_that_do_not_stand_in_the_text_are_left_out() -> None:
    for fields in ([[1, "n"]], [[-6, "n"]], [[0, "no"]], [["0", "n"]], [[0, 1]], [0], {"0": "n"}, None):
        assert renamed(ErrorText.read("n is 3", fields), NAMES) == "n is 3", fields
    assert renamed(ErrorText.read("n is 3", [[0, "n"], [0, "n"]]), NAMES) == "num is 3"
