"""Settings that a bucket and a folder share: what a batch is given, and what becomes of its input."""

from __future__ import annotations

from abc import ABC
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field

from producers.contract.batch import ENDPOINTS, METADATA_FORM, WINDOW_FORM, is_metadata, window_s
from producers.contract.task import MAX_TENANT
from producers.errors import shown
from producers.sources.source import SourceSettings

#: Most bytes of an input, unless the settings say otherwise: as many as a gateway takes.
MAX_FILE = 2 << 30


def _window(value: str) -> str:
    if window_s(value) is None:
        raise ValueError(f"it is {shown(value)}; it must be {WINDOW_FORM}")
    return value


def _metadata(value: dict[str, Any]) -> dict[str, Any]:
    if "source" in value or not is_metadata({**value, "source": ""}):
        wanted = f"{METADATA_FORM}; one of them is `source`, the input's own URL"
        raise ValueError(f"it is {shown(value)}; it must be {wanted}")
    return value


def _endpoint(value: str) -> str:
    if value not in ENDPOINTS:
        raise ValueError(f"it is {shown(value)}; it must be one of {', '.join(ENDPOINTS)}")
    return value


class InboxSettings(SourceSettings, ABC):
    """The settings of each batch of a source."""

    endpoint: Annotated[str, AfterValidator(_endpoint)] | None = Field(
        None, description=f"one of {', '.join(ENDPOINTS)}; unset: the `url` of the input's first line"
    )
    completion_window: Annotated[str, AfterValidator(_window)] = Field("24h", description=WINDOW_FORM)
    tenant: str | None = Field(
        None, min_length=1, max_length=MAX_TENANT, description=f"a name of 1 to {MAX_TENANT} characters"
    )
    metadata: Annotated[dict[str, Any], AfterValidator(_metadata)] = Field(
        default_factory=dict, description=METADATA_FORM
    )
    after: Literal["move", "leave"] = Field(
        "move", description='"move" (inputs go to done/ when their batch has ended) or "leave"'
    )
    max_file: int = Field(MAX_FILE, ge=1, description="the most bytes of an input, 1 or more")
