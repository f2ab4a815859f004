"""Labels of tokens to entities, as transformers' token-classification pipeline makes them.

probabilities of a text's tokens ─▶ tokens, or words (`Aggregation`), with their labels ─▶ neighbours of one label

The difference: where a token may have several labels, each that reaches the threshold counts, and neighbours are put
together label by label.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Final

import numpy as np
from numpy.typing import NDArray

from engine.errors import NOT_FINITE, ErrorText, TextError
from engine.labels import MAX_ENTITIES, OUTSIDE, Aggregation, Entity, TokenSpan
from engine.plan import Sampled
from engine.request import Pooling

#: The least score of a label where a token may have several, unless the request says another.
_THRESHOLD: Final = 0.5

Scores = NDArray[np.float64]


def labelled(scores: Scores, labels: Sequence[str], several: bool, pooling: Pooling, number: int) -> Sampled:
    """The result of the text of this number in its request.

    `scores`: of its tokens, [tokens, labels]. `several`: whether a token may have several labels.
    """
    if not np.isfinite(scores).all():
        return Sampled(-1, error=NOT_FINITE)
    least = pooling.threshold if pooling.threshold is not None else _THRESHOLD if several else 0.0
    if several and (count := int(np.count_nonzero(scores >= least))) > MAX_ENTITIES:
        return _too_many(count, pooling, number)
    spans = pooling.spans[number] if pooling.spans else (None,) * len(scores)
    words = _words(spans, pooling.aggregation)
    picked = [_labels_of(scores[tokens], labels, pooling.aggregation, least if several else None) for tokens in words]
    pieces = [
        [Entity(label, score, _span(spans[tokens[0]]).start, _span(spans[tokens[-1]]).end) for label, score in named]
        for tokens, named in zip(words, picked, strict=True)
    ]
    entities = [*chain.from_iterable(pieces)] if pooling.aggregation == "none" else _grouped(pieces)
    kept = tuple(entity for entity in entities if entity.label != OUTSIDE and (several or entity.score >= least))
    return _too_many(len(kept), pooling, number) if len(kept) > MAX_ENTITIES else Sampled(-1, row=kept)


def _too_many(count: int, pooling: Pooling, number: int) -> Sampled:
    advice = f" has {count} labelled parts, more than {MAX_ENTITIES}; give a higher threshold"
    if pooling.item_errors:
        return Sampled(-1, row=TextError("invalid_value", f"the text{advice}"))
    return Sampled(-1, error=ErrorText.of("{input}[{}]{}", number, advice), refused=True)


def _span(span: TokenSpan | None) -> TokenSpan:
    assert span is not None
    return span


def _words(spans: Sequence[TokenSpan | None], aggregation: Aggregation) -> list[list[int]]:
    """The numbers of each word's tokens, or of each token where tokens have labels of their own."""
    alone = aggregation in ("none", "simple")
    words: list[list[int]] = []
    for number, span in enumerate(spans):
        if span is None:
            continue
        if words and span.continues and not alone:
            words[-1].append(number)
        else:
            words.append([number])
    return words


def _labels_of(
    scores: Scores, labels: Sequence[str], aggregation: Aggregation, least: float | None
) -> list[tuple[str, float]]:
    """The labels of a word, with their scores, of those of its tokens. `least`: the least score of a label; None: it
    has the likeliest one."""
    if aggregation == "average":
        row = scores.mean(0)
    elif aggregation == "max":
        row = scores[scores.max(1).argmax()]
    else:
        row = scores[0]
    numbers = [int(row.argmax())] if least is None else np.flatnonzero(row >= least).tolist()
    return [(labels[number], float(row[number])) for number in numbers]


def _tag(label: str) -> tuple[bool, str]:
    """Whether a label begins an entity, and the entity's own label. As in transformers, a label without `B-` or `I-`
    goes on with an entity."""
    return label.startswith("B-"), label[2:] if label[:2] in ("B-", "I-") else label


def _grouped(words: Sequence[Sequence[Entity]]) -> list[Entity]:
    """Neighbours of one label together, in the order in which they begin."""
    groups: list[list[Entity]] = []
    current: dict[str, list[Entity]] = {}
    for pieces in words:
        likeliest: dict[str, tuple[bool, Entity]] = {}
        for piece in pieces:
            begins, tag = _tag(piece.label)
            if tag not in likeliest or piece.score > likeliest[tag][1].score:
                likeliest[tag] = begins, piece
        following: dict[str, list[Entity]] = {}
        for tag, (begins, piece) in likeliest.items():
            if begins or tag not in current:
                following[tag] = []
                groups.append(following[tag])
            else:
                following[tag] = current[tag]
            following[tag].append(piece)
        current = following
    return [
        # transformers cuts at the first hyphen, whatever is before it.
        Entity(
            group[0].label.split("-", 1)[-1],
            sum(piece.score for piece in group) / len(group),
            group[0].start,
            group[-1].end,
        )
        for group in groups
    ]
