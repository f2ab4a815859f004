"""The release's number stands in one place, and what is said of releases agrees with it."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

from tests.processes import ROOT

RELEASES = re.findall(r"^## (\d+\.\d+\.\d+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)


def test_the_changelog_begins_with_this_release_and_the_wheel_is_of_the_one_before() -> None:
    this = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    (wheel,) = Path(__file__).parent.glob("*.whl")
    assert RELEASES[:2] == [this, wheel.name.split("-")[1]]
    assert list(RELEASES) == sorted(RELEASES, key=lambda release: [*map(int, release.split("."))], reverse=True)


def test_each_release_says_what_to_do_before_upgrading() -> None:
    said = re.findall(r"^\| (\d+\.\d+\.\d+) \|", (ROOT / "docs" / "run" / "upgrading.md").read_text(), re.MULTILINE)
    assert said == RELEASES
