"""Settings that a bucket and a folder share: what a batch is given, and what becomes of its input."""

from __future__ import annotations

from abc import ABC
from typing import Annotated, Any, Literal

from pydantic import Field

from producers.contract.task import MAX_TENANT
from producers.sources.source import SourceSettings, fitting
from producers.store.batches import ENDPOINTS, METADATA_FORM, WINDOW_FORM, is_metadata, window_s

#: Most bytes of an input, unless the settings say otherwise: as many as a gateway takes.
MAX_FILE = 2 << 30


def _is_metadata(value: dict[str, Any]) -> bool:
    return "source" not in value and is_metadata({**value, "source": ""})


class InboxSettings(SourceSettings, ABC):
    """The settings of each batch of a source."""

    endpoint: Annotated[str, fitting(ENDPOINTS.__contains__, f"one of {', '.join(ENDPOINTS)}")] | None = Field(
        None, description=f"one of {', '.join(ENDPOINTS)}; unset: the `url` of the input's first line"
    )
    completion_window: Annotated[str, fitting(window_s, WINDOW_FORM)] = Field("24h", description=WINDOW_FORM)
    tenant: str | None = Field(
        None, min_length=1, max_length=MAX_TENANT, description=f"a name of 1 to {MAX_TENANT} characters"
    )
    metadata: Annotated[
        dict[str, Any], fitting(_is_metadata, f"{METADATA_FORM}; one of them is `source`, the input's own URL")
    ] = Field(default_factory=dict, description=METADATA_FORM)
    after: Literal["move", "leave"] = Field(
        "move", description='"move" (inputs go to done/ when their batch has ended) or "leave"'
    )
    max_file: int = Field(MAX_FILE, ge=1, description="the most bytes of an input, 1 or more")
