"""Values as errors show them."""

from __future__ import annotations

from typing import Any

import pytest

from producers import errors
from producers.errors import MANY, shown


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ([1] * 1_000_000, f"a list of more than {MANY} values"),
        ({"a": [{}] * 1_000_000}, f"an object of more than {MANY} values"),
        ([[[{"a": [0] * 500}] * 2] * 2], f"a list of more than {MANY} values"),
        ([1] * MANY, f"[{'1, ' * 19}1,... ({3 * MANY} characters)"),
        ({"a": [1, None]}, '{"a": [1, null]}'),
    ],
)
def test_a_value_of_many_others_is_not_written_out(monkeypatch: pytest.MonkeyPatch, value: Any, text: str) -> None:
    """That took the event loop a quarter of a second."""
    if text.startswith("a"):
        monkeypatch.setattr(errors.json, "dumps", lambda *_, **__: pytest.fail("it was written out"))
    assert shown(value) == text
