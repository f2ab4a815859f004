"""A broker is chosen by its URL."""

from __future__ import annotations

import pytest

from producers.broker.connect import connect_consumer


def test_an_unknown_scheme_is_refused_by_name_and_no_password_is_shown() -> None:
    with pytest.raises(ValueError, match=r"'kafka://host'.*redis://") as refused:
        connect_consumer("kafka://user:secret@host", ["q"], "redis://127.0.0.1")
    assert "secret" not in str(refused.value)
