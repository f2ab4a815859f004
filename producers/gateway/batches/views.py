"""Batches as OpenAI's clients see them."""

from __future__ import annotations

from typing import Any, Literal, Self, cast

from pydantic import BaseModel, Field

from producers.gateway.tasks.views import Named, Page
from producers.store.batches import Batch

Status = Literal["validating", "failed", "in_progress", "finalizing", "completed", "expired", "cancelling", "cancelled"]


class Reason(BaseModel):
    """Why a batch failed as a whole. `line` is from 1; null where no line is at fault."""

    code: str
    message: str
    line: int | None = None
    param: str | None = None


class Reasons(BaseModel):
    object: Literal["list"] = "list"
    data: list[Reason]


class Counts(BaseModel):
    total: int = Field(description="0 until the input is validated")
    completed: int
    failed: int


class BatchView(Named):
    """A batch. Times are unix seconds."""

    object: Literal["batch"] = "batch"
    endpoint: str
    errors: Reasons | None
    input_file_id: str
    completion_window: str
    status: Status
    output_file_id: str | None = Field(description="the answers; null until it ends, or without any")
    error_file_id: str | None = Field(description="the lines that failed; null until it ends, or without any")
    created_at: int
    in_progress_at: int | None
    expires_at: int
    finalizing_at: int | None
    completed_at: int | None
    failed_at: int | None
    expired_at: int | None
    cancelling_at: int | None
    cancelled_at: int | None
    request_counts: Counts
    metadata: dict[str, str] | None

    @classmethod
    def of(cls, batch: Batch) -> Self:
        def at(name: str) -> int | None:
            time = batch.time(name)
            return None if time is None else time // 1000

        times: dict[str, Any] = {name: at(name) for name in cls.model_fields if name.endswith("_at")}
        reasons = batch.json("reasons")
        return cls(
            id=batch.id,
            endpoint=batch.endpoint,
            errors=None if reasons is None else Reasons(data=reasons),
            input_file_id=batch.input_file,
            completion_window=batch.fields["completion_window"],
            status=cast(Status, batch.status),
            output_file_id=batch.fields.get("output_file"),
            error_file_id=batch.fields.get("error_file"),
            **times | {"created_at": at("created") or 0, "expires_at": at("deadline") or 0},
            request_counts=Counts(
                total=batch.total or 0, completed=batch.count("completed"), failed=batch.count("failed")
            ),
            metadata=batch.metadata,
        )


class BatchList(Page[BatchView]):
    pass
