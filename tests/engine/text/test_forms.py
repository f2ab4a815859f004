"""Whatever a form allows is, as text, of that form: with tokenizers of each common make."""

from __future__ import annotations

import json
import random
import re

import numpy as np
import pytest
import tokenizers

from engine.errors import RequestError
from engine.grammar.matcher import Grammars, Matcher
from engine.params import SamplingParams
from tests.engine.text.test_detokenizer import pieces

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "pattern": "^[A-Z][a-zé ]{1,9}$"},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["a b", "c", None]}, "maxItems": 3},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
MAIL = r"[a-z]{1,8}(\.[a-z]{1,8})?@[a-z]{2,9}\.(com|org)"
SUM = 'start: NUMBER (" + " NUMBER){1,3}\nNUMBER: /[1-9][0-9]{0,4}/'


def allowed(matcher: Matcher, size: int) -> list[int]:
    mask = np.zeros(-(-size // 32), np.int32)
    matcher.allow(mask)
    return np.unpackbits(mask.view(np.uint8), bitorder="little").nonzero()[0].tolist()


def drawn(tokenizer: tokenizers.Tokenizer, params: SamplingParams, seed: int) -> str:
    """A random text of the form, as the detokenizer writes it."""
    size, end = tokenizer.get_vocab_size(), tokenizer.token_to_id("<|end|>")
    matcher = Grammars(tokenizer.to_str, size, [end]).maker(params)()
    draw, output = random.Random(seed), []
    while len(output) < 400:
        token_id = draw.choice(allowed(matcher, size))
        if token_id == end:
            break
        output.append(token_id)
        if matcher.push(token_id):
            break
    return "".join(pieces(tokenizer, output))


@pytest.mark.parametrize("make", ["byte_level", "byte_fallback"])
@pytest.mark.parametrize("seed", range(3))
def test_what_is_allowed_is_of_the_form(make: str, seed: int, request: pytest.FixtureRequest) -> None:
    import jsonschema  # a machine with a GPU, which collects this file, has no such package

    tokenizer = request.getfixturevalue(make)
    found = drawn(tokenizer, SamplingParams(json_schema=PERSON), seed)
    jsonschema.validate(json.loads(found), PERSON)
    assert re.fullmatch(MAIL, drawn(tokenizer, SamplingParams(regex=MAIL), seed))
    assert re.fullmatch(r"[1-9]\d{0,4}( \+ [1-9]\d{0,4}){1,3}", drawn(tokenizer, SamplingParams(grammar=SUM), seed))


def test_a_tokenizer_of_another_make_is_refused(metaspace: tokenizers.Tokenizer) -> None:
    with pytest.raises(RequestError, match="regex cannot be followed: llguidance cannot read the model's tokenizer"):
        drawn(metaspace, SamplingParams(regex="a"), 0)
