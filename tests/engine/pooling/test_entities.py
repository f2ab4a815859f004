"""What transformers' pipeline does not have: several labels of a token, thresholds, and results that are too large."""

from __future__ import annotations

import numpy as np

from engine.errors import NOT_FINITE
from engine.labels import MAX_ENTITIES, Entity, TokenSpan
from engine.pooling.entities import labelled
from engine.request import Pooling

LABELS = ("O", "B-PER", "I-PER", "LOC")
#: [CLS], "ab", "##c", "de", [SEP] of "abc de".
SPANS = (None, TokenSpan(0, 2, False), TokenSpan(2, 3, True), TokenSpan(4, 6, False), None)


def pooling(**more: object) -> Pooling:
    return Pooling("token_classify", (len(SPANS),), spans=(SPANS,), **more)  # type: ignore[arg-type]


def test_several_labels_of_a_token_are_put_together_label_by_label() -> None:
    scores = np.zeros((5, 4))
    scores[1], scores[2], scores[3] = [0.1, 0.8, 0.6, 0.6], [0.9, 0.0, 0.75, 0.4], [0.0, 0.2, 0.7, 0.8]
    result = labelled(scores, LABELS, True, pooling(), 0).row
    assert result == (
        Entity("PER", 0.75, 0, 6),  # the likelier one of B- and I-; its mean
        Entity("LOC", 0.6, 0, 2),
        Entity("LOC", 0.8, 4, 6),  # a token without it stood between
    )
    words = labelled(scores, LABELS, True, pooling(aggregation="first", threshold=0.75), 0).row
    assert words == (Entity("PER", 0.8, 0, 3), Entity("LOC", 0.8, 4, 6))
    tokens = labelled(scores, LABELS, True, pooling(aggregation="none", threshold=0.7), 0).row
    assert [(entity.label, entity.start) for entity in tokens or ()] == [
        ("B-PER", 0),
        ("I-PER", 2),
        ("I-PER", 4),
        ("LOC", 4),
    ]


def test_a_threshold_is_for_what_is_put_together() -> None:
    scores = np.zeros((5, 4))
    scores[1, 1], scores[2, 2], scores[3, 3] = 0.9, 0.5, 0.6
    assert labelled(scores, LABELS, False, pooling(threshold=0.7), 0).row == (Entity("PER", 0.7, 0, 3),)


def test_what_is_not_finite_or_too_much_is_an_error() -> None:
    scores = np.full((5, 4), 0.6)
    scores[4, 0] = np.nan
    assert labelled(scores, LABELS, False, pooling(), 0).error == NOT_FINITE
    many = np.full((MAX_ENTITIES // 4 + 1, 4), 0.6)
    refusal = labelled(many, LABELS, True, pooling(), 0)
    assert refusal.refused
    assert str(refusal.error).startswith("input[0] has ")
    assert f"more than {MAX_ENTITIES}; give a higher threshold" in (refusal.error or "")
    assert labelled(scores[:4], LABELS, False, Pooling("token_classify", (4,)), 0).row == ()  # a probe has no spans
