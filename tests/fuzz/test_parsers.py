"""Every reader by itself, on some examples and on all that was ever found."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fuzz.drawing import drawn
from tests.fuzz.parsers import CORPUS, TARGETS, corpus
from tests.histories import examples


@pytest.mark.parametrize("name", TARGETS)
def test_what_is_nearly_right_is_read_or_refused(name: str) -> None:
    for data in drawn(TARGETS[name].good, examples(25, 60), 11):
        TARGETS[name].read(data)


@pytest.mark.parametrize("found", [path for name in TARGETS for path in corpus(name)], ids=lambda path: path.name)
def test_what_was_found_is_mended(found: Path) -> None:
    TARGETS[found.parent.name].read(found.read_bytes())


def test_the_corpus_is_of_targets_that_there_are() -> None:
    assert {path.name for path in CORPUS.iterdir()} <= TARGETS.keys()
