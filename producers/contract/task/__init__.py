"""A task as a caller writes it, and its validation at the edge.

A refused task is never queued. The limits of sampling are those that `engine.params.SamplingParams` declares, so that
no worker refuses an accepted task.

    a caller's JSON -> fields.py (types) -> task.py (Task: checked, resolved for a model) -> its record
    limits.py has the numbers; refusals.py, what a caller reads of a refused task
"""

from producers.contract.task.limits import (
    ASSUMED_OUTPUT,
    MAX_LOGPROBS,
    MAX_PROMPT_BYTES,
    MAX_PROMPT_TOKENS,
    MAX_TENANT,
)
from producers.contract.task.refusals import label, likely, read_json
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
