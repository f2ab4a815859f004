"""The release before this one, for all of these tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.releases import before as wheel


@pytest.fixture(scope="session")
def before(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The release before, unpacked."""
    folder = tmp_path_factory.mktemp("before")
    wheel.unpack(folder)
    return folder
