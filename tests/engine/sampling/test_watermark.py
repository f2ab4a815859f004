"""A watermark's green tokens are the likelier by delta, what is forbidden stays so, and the detector counts rightly."""

from __future__ import annotations

import math
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.errors import EngineError
from engine.sampling import SamplingRows
from engine.sampling.rows import edit
from engine.sampling.watermark import binomial_tail, detect, is_green
from engine.watermark import WatermarkKey, read_watermarks, written
from tests.engine.sampling.sequences import sequence

VOCAB = 5_000
KEY = WatermarkKey("news", b"s" * 32, gamma=0.25, delta=2.5, context=2)


def green(key: WatermarkKey, context: list[int]) -> torch.Tensor:
    """One position's green tokens, by the definition."""
    row = torch.frombuffer(bytearray(key.row_key(context)), dtype=torch.int32)
    return is_green(row, torch.arange(VOCAB, dtype=torch.int32), key.limit)


def edited(logits: torch.Tensor, sequences: list[Any], drafts: Any = None) -> torch.Tensor:
    rows = SamplingRows(8, VOCAB, torch.device("cpu"))
    for each in dict.fromkeys(sequences):
        rows.admit(each)
    edits = rows.gather(sequences, drafts).edits
    result = logits.clone()
    if edits is not None:
        edit(result, edits)
    return result


def test_green_tokens_gain_delta_after_their_own_context_and_nobody_elses_do() -> None:
    marked, plain = sequence(0, prompt=(1, 2, 3)), sequence(1, prompt=(1, 2, 3))
    other = sequence(2, prompt=(7,))
    marked.watermark, other.watermark = KEY, WatermarkKey("other", b"t" * 32, delta=1.0, context=1)
    logits = torch.zeros(3, VOCAB)
    found = edited(logits, [marked, plain, other])
    assert found[0].equal(2.5 * green(KEY, [2, 3]))
    assert found[1].equal(logits[1])
    assert found[2].equal(1.0 * green(other.watermark, [7]))
    assert abs(green(KEY, [2, 3]).float().mean() - 0.25) < 0.03
    assert not green(KEY, [2, 3]).equal(green(KEY, [3, 2]))


def test_after_a_draft_its_tokens_are_the_context() -> None:
    one = sequence(0, prompt=(1, 2))
    one.watermark = KEY
    found = edited(torch.zeros(3, VOCAB), [one] * 3, [(), (8,), (8, 9)])
    for row, context in zip(found, ([1, 2], [2, 8], [8, 9]), strict=True):
        assert row.equal(2.5 * green(KEY, context))


def test_what_is_banned_stays_banned_and_penalties_and_biases_are_kept() -> None:
    first, second, third = green(KEY, [1, 2]).nonzero().view(-1).tolist()[:3]
    one = sequence(0, prompt=(1, 2), banned_token_ids=(first,), logit_bias={second: 1.5}, presence_penalty=0.5)
    one.watermark = KEY
    one.tokens += [third, 1, 2]
    found = edited(torch.zeros(1, VOCAB), [one])[0]
    assert found[[first, second, third]].tolist() == [-math.inf, 4.0, 2.0]


def test_marked_tokens_are_found_by_their_key_alone_and_repetitions_count_once() -> None:
    tokens = [1, 2]
    for at in range(60):
        tokens.append(int(green(KEY, tokens).nonzero()[10 * at]))
    found = detect(KEY, tokens)
    assert (found.judged, found.green) == (60, 60)
    assert found.p == pytest.approx(KEY.gamma**60)
    assert found.z == pytest.approx(math.sqrt(60 * 3))
    assert detect(WatermarkKey("b", b"t" * 32), tokens).p > 1e-3
    # Twice the same text: what is judged anew are the two n-grams across the seam.
    assert detect(KEY, tokens * 2).judged == 62
    assert detect(KEY, [4] * 50).judged == 1
    for short in ([], [1, 2]):
        assert detect(KEY, short).p == 1.0


@pytest.mark.parametrize(("n", "share"), [(1, 0.25), (7, 0.5), (40, 0.25), (50, 0.9)])
def test_the_tail_is_the_sum_of_the_distributions_terms(n: int, share: float) -> None:
    part = Fraction(share)
    terms = [math.comb(n, k) * part**k * (1 - part) ** (n - k) for k in range(n + 1)]
    for least in range(n + 2):
        assert binomial_tail(n, least, share) == pytest.approx(float(sum(terms[least:])), rel=1e-9, abs=1e-300)


def test_a_long_texts_tail_is_a_number() -> None:
    assert binomial_tail(1_000_000, 250_000, 0.25) == pytest.approx(0.5, abs=1e-3)
    assert binomial_tail(1_000_000, 900_000, 0.25) == 0.0
    assert binomial_tail(1_000_000, 10, 0.25) == 1.0


def test_a_file_of_keys_is_read_as_it_is_written(tmp_path: Path) -> None:
    file = tmp_path / "keys.toml"
    file.write_text(written("a.b", "0" * 64) + written("c", "1" * 64))
    made = read_watermarks(file, "c", optional=True)
    assert made.describe() == {"keys": ["a.b", "c"], "default": "c", "optional": True}
    assert made.keys["c"].secret not in (made.keys["a.b"].secret, b"")
    assert "secret" not in repr(made)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "has no watermark key"),
        ("secret = 'ssssssssssssssssss'\n", "it must be a table"),
        ("[a]\n", "secret must be a text of 16"),
        ("[a]\nsecret = 'short-SECRET'\n", "secret must be a text of 16"),
        ("[a]\nsecret = '" + "SECRET" * 5 + "'\ngama = 1\n", "it has 'gama'"),
        ("[a]\nsecret = '" + "SECRET" * 5 + "'\ngamma = 1.5\n", "gamma=1.5"),
        ("[a]\nsecret = '" + "SECRET" * 5 + "'\ncontext = true\n", "context=True"),
        ("[a]\nsecret = '" + "SECRET" * 5 + "'\ndelta = nan\n", "delta=nan"),
        ("['a b']\nsecret = '" + "SECRET" * 5 + "'\n", "'a b'"),
        ("[false]\nsecret = '" + "SECRET" * 5 + "'\n", "want no watermark"),
        ("[a]\nsecret = SECRET\n", "are not TOML"),
        ("x" * ((1 << 20) + 1), "more than 1048576 bytes"),
    ],
)
def test_a_bad_file_of_keys_is_refused_without_its_secret(tmp_path: Path, text: str, said: str) -> None:
    file = tmp_path / "keys.toml"
    file.write_text(text)
    with pytest.raises(EngineError) as refused:
        read_watermarks(file)
    assert said in str(refused.value)
    assert "SECRET" not in str(refused.value)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match=r"cannot read the watermark keys .*none\.toml"):
        read_watermarks(tmp_path / "none.toml")
