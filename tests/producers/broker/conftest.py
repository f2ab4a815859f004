"""Each broker that there is, empty."""

from __future__ import annotations

import uuid

import pytest


@pytest.fixture(params=["redis", "memory"])
def url(request: pytest.FixtureRequest) -> str:
    if request.param == "memory":
        return f"memory://{uuid.uuid4()}"
    request.getfixturevalue("valkey")
    found: str = request.getfixturevalue("valkey_url")
    return found
