"""The Python client is typed: mypy accepts the example of docs/use/tasks.md, and finds mistakes in it."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
EXAMPLE = re.findall(r"^```python\n(.*?)^```$", (ROOT / "docs" / "use" / "tasks.md").read_text(), re.M | re.S)[0]
#: A part of the example and what replaces it. All but the first are wrong.
WRONG = {
    "": ("", ""),
    "a misspelt status": ('status="completed"', 'status="done"'),
    "no such filter": ("limit=10", "limits=10"),
    "no such field": ("task.tier", "task.tear"),
    "a number as a key": ('idempotency_key="order-8"', "idempotency_key=8"),
}


# mypy reads the whole client for it, which takes seconds.
@pytest.mark.exhaustive
@pytest.mark.timeout(600)
def test_mypy_knows_the_types_of_the_example(tmp_path: Path) -> None:
    files = []
    for number, (old, new) in enumerate(WRONG.values()):
        assert old in EXAMPLE
        file = tmp_path / f"example{number}.py"
        file.write_text(EXAMPLE.replace(old, new))
        files.append(str(file))
    command = [sys.executable, "-m", "mypy", "--strict", "--follow-imports=silent", *files]
    said = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=500).stdout
    wrong = {Path(line.partition(":")[0]).name for line in said.splitlines() if ": error:" in line}
    assert wrong == {Path(file).name for file in files[1:]}, said
