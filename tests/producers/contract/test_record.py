"""What of a `traceparent` counts, by the specification's own examples and rules."""

from __future__ import annotations

from typing import Any

import pytest

from engine.errors import ErrorText, renamed
from producers.contract.record import Record, error_json, trace_fields, trace_id

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
GOOD = f"00-{TRACE}-00f067aa0ba902b7-01"


@pytest.mark.parametrize(
    "given", [GOOD, f"00-{TRACE}-00f067aa0ba902b7-ff", f"cc-{TRACE}-00f067aa0ba902b7-01-what.next"]
)
def test_a_good_one_is_kept_as_it_is(given: str) -> None:
    assert trace_id(given) == TRACE
    assert trace_fields(given) == {"traceparent": given}


@pytest.mark.parametrize(
    "given",
    [
        *(None, 7, "", "x", GOOD.upper(), f" {GOOD}", f"{GOOD}\n", GOOD[:-1], f"{GOOD}-more", GOOD.replace("-", "_")),
        f"ff-{TRACE}-00f067aa0ba902b7-01",
        f"00-{'0' * 32}-00f067aa0ba902b7-01",
        f"00-{TRACE}-{'0' * 16}-01",
        f"cc-{TRACE}-00f067aa0ba902b7-01.what.next",
        f"cc-{TRACE}-00f067aa0ba902b7-01-a\nb",
    ],
)
def test_a_bad_one_is_ignored(given: Any) -> None:
    assert (trace_id(given), trace_fields(given)) == (None, {})


def test_an_error_knows_its_fields_and_shows_them_to_nobody() -> None:
    stored = error_json("invalid_value", ErrorText.of("{n} is {}", "n"), "n")
    error = Record("a", {"error": stored}).json("error")
    assert error == {"code": "invalid_value", "message": "n is n", "param": "n"}
    assert renamed(error["message"], {"n": "choices"}) == "choices is n"
