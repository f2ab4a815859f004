"""docs/run/scaling.md has every setting of a pool with its default, and every actuator."""

from __future__ import annotations

import re
from pathlib import Path

from workers.autoscaler.actuators import EXPORT, SCHEMES
from workers.autoscaler.policy import Rules
from workers.autoscaler.pools import Table

PAGE = (Path(__file__).parents[3] / "docs" / "run" / "scaling.md").read_text("utf-8")


def rows(heading: str) -> dict[str, str]:
    """The first table after a heading: names in its first column -> second column."""
    table = PAGE.partition(f"\n## {heading}\n")[2].partition("| --- |")[2].partition("\n\n")[0]
    return {
        name: cells[1].strip()
        for line in table.splitlines()
        if line.startswith("| `") and (cells := line.strip("|").split("|"))
        for name in re.findall(r"`([^`]+)`", cells[0])
    }


def test_every_setting_is_there_with_its_default() -> None:
    listed = rows("Settings")
    assert set(listed) == set(Table.model_fields)
    for name in set(Table.model_fields) - {"model", "version", "actuator", "tries", "start_limit", "keep_warm"}:
        default = getattr(Rules(), name)
        for number in default.values() if isinstance(default, dict) else [default]:
            assert re.search(rf"\b{number:g}\b", listed[name]), name


def test_every_actuator_is_there() -> None:
    assert {re.split("[:/]", url)[0] for url in rows("Actuators")} == {EXPORT, *SCHEMES}
