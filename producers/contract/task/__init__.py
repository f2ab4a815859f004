"""A task as a caller writes it, and its validation at the edge.

A refused task is never queued. The limits of sampling are those that `engine.params.SamplingParams` declares, so that
no worker refuses an accepted task.

    a caller's JSON -> fields.py (types, limits, refusals) -> task.py (Task: checked, fitted to a model) -> its record
"""

from producers.contract.task.fields import (
    ASSUMED_OUTPUT,
    MAX_LOGPROBS,
    MAX_PROMPT_BYTES,
    MAX_PROMPT_TOKENS,
    MAX_TENANT,
    label,
    likely,
    read_json,
)
from producers.contract.task.task import Task

__all__ = [
    "ASSUMED_OUTPUT",
    "MAX_LOGPROBS",
    "MAX_PROMPT_BYTES",
    "MAX_PROMPT_TOKENS",
    "MAX_TENANT",
    "Task",
    "label",
    "likely",
    "read_json",
]
