"""docs/use/parameters.md has every field of a task, with its limits as the code has them."""

from __future__ import annotations

import json
from pathlib import Path

from engine.params import DEFAULTS
from producers.contract.task import Task

PAGE = Path(__file__).parents[2] / "docs" / "use" / "parameters.md"


def rows() -> list[str]:
    """The page's table, from the code."""
    found = []
    for name, field in Task.model_fields.items():
        if name in DEFAULTS:
            unset = f"the model's own, else {DEFAULTS[name]:g}"
        elif field.is_required():
            unset = "must be given"
        else:
            value = field.get_default(call_default_factory=True)
            unset = "" if value is None else "none" if value in ((), {}) else json.dumps(value)
        found.append(f"| `{name}` | {field.description} | {unset} |")
    return found


def test_the_page_lists_what_a_task_takes() -> None:
    page = PAGE.read_text("utf-8").splitlines()
    listed = [line for line in page if line.startswith("| `")]
    assert listed == rows()
