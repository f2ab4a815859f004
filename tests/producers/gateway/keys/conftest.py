"""A file's tests share a gateway that asks for keys."""

from __future__ import annotations

from typing import Any

import pytest

from tests.producers.gateway.test_keys import make as make  # the fixture


@pytest.fixture(scope="module")
def shared_settings() -> dict[str, Any]:
    return {"auth": "keys"}
