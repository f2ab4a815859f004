from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.errors import TextError
from engine.labels import Entity
from producers.contract.stream import (
    End,
    Logprobs,
    Token,
    decode,
    decode_message,
    encode_prompt,
    encode_rows,
    encode_token,
    row_view,
    rows_of,
    stream_position,
)

LOGPROB = st.floats(-100, 0)
LOGPROBS = st.none() | st.tuples(LOGPROB, st.lists(st.tuples(st.integers(0, 2**31), LOGPROB), max_size=3).map(tuple))


@given(
    st.integers(0, 63),
    st.integers(0, 10**6),
    st.integers(0, 2**31),
    st.text(st.characters(exclude_categories=["Cs"])),
    LOGPROBS,
    st.none() | st.sampled_from(["stop", "length", "error"]),
)
def test_a_token_comes_back_as_it_was_written(
    choice: int, index: int, token_id: int, text: str, logprobs: Logprobs | None, finish: str | None
) -> None:
    entry = encode_token(choice, index, token_id, text, logprobs, finish)
    assert decode(9, json.loads(entry)) == Token(9, choice, index, token_id, text, logprobs, finish)
    ((position, parsed),) = decode_message(f"[4,{entry}]")
    assert decode(position, parsed) == Token(4, choice, index, token_id, text, logprobs, finish)


@given(st.lists(LOGPROBS, min_size=1, max_size=4), st.sampled_from([1, 510, 512, 1023]))
def test_a_prompt_comes_back_in_pieces_as_it_was_written(some: list[Logprobs | None], length: int) -> None:
    logprobs = (some * length)[:length]
    pieces = [decode(at, json.loads(entry)) for at, entry in enumerate(encode_prompt(range(length), logprobs))]
    assert [piece.first for piece in pieces] == list(range(0, length, 512))
    assert [piece.position for piece in pieces] == list(range(len(pieces)))
    assert [token_id for piece in pieces for token_id in piece.token_ids] == list(range(length))
    assert [one for piece in pieces for one in piece.logprobs] == logprobs


def test_a_terminal_entry_is_an_end_and_an_unknown_kind_is_nothing() -> None:
    entry = {"end": "failed", "reasons": ["stop", None], "usage": {"output_tokens": 1}, "error": {"code": "x"}}
    assert decode(3, entry) == End(3, "failed", ("stop", None), {"output_tokens": 1}, {"code": "x"})
    assert decode(3, {"note": 1}) is None


@pytest.mark.parametrize(("name", "position"), [(b"1-0", 0), ("17-0", 16)])
def test_positions_are_entry_ids_less_one(name: str | bytes, position: int) -> None:
    assert stream_position(name) == position


def test_labelled_parts_come_back_as_they_were_written() -> None:
    rows = [
        (Entity("PER", 0.5, 0, 4), Entity("LOC", 0.25, 9, 1 << 20)),
        TextError("a", "b"),
        (),
        (Entity("PER", 1, 2, 3),),
    ]
    assert rows_of(json.loads(encode_rows(rows))) == rows
    assert [row_view(row) for row in rows][1:3] == [{"error": {"code": "a", "message": "b"}}, []]
    assert rows_of(json.loads(encode_rows([(), ()]))) == [(), ()]
    with pytest.raises(ValueError, match="not those of"):
        rows_of(json.loads(encode_rows(rows)) | {"counts": [1, 0, 0, 0]})
