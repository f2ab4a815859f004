"""sentence-transformers asks a hub for what a folder lacks; here it is told that there is none."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def no_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    constants = pytest.importorskip("huggingface_hub.constants")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
