"""A file's tests share a gateway; one that changes or ends its gateway starts its own."""

from __future__ import annotations

import pytest

from tests.producers.gateway.conftest import Door


@pytest.fixture
def door(shared_door: Door, model: str) -> Door:
    return shared_door
