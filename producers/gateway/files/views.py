"""Files as OpenAI's clients see them."""

from __future__ import annotations

from dataclasses import asdict
from typing import Literal, Self

from pydantic import BaseModel, Field

from producers.gateway.tasks.views import Named, Page
from producers.store.files import File


class FileView(Named):
    """A file. Times are unix seconds."""

    object: Literal["file"] = "file"
    bytes: int
    created_at: int
    expires_at: int | None
    filename: str
    purpose: str = Field(description="batch: an input; batch_output: what a batch wrote")
    status: Literal["processed"] = "processed"
    status_details: None = None

    @classmethod
    def of(cls, file: File) -> Self:
        return cls(**asdict(file) | {"bytes": file.size, "status": "processed"})


class FileList(Page[FileView]):
    pass


class FileDeleted(BaseModel):
    id: str
    object: Literal["file"] = "file"
    deleted: bool
