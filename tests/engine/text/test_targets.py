"""The targets of a quantised checkpoint's groups: which matrices they mean, and that no file makes that take long."""

from __future__ import annotations

import random
import re

import pytest

from engine.errors import ModelError
from engine.text.config import Targets, packed_bits

PROJECTION = "model.layers.12.mlp.down_proj"


@pytest.mark.parametrize(
    ("pattern", "fits"),
    [
        (r"re:.*layers\.\d+\.mlp\.(down|x)_proj$", True),
        (r"re:.*layers\.\d+\.mlp\.(down|x)_pro$", False),
        (r"re:.*layers\.\d+\.mlp\.(down|x)_pro", True),
        (r"re:^model.layers.1.*.(gate|gate_up|d|down)_proj", True),
        (r"re:layers\.12", False),
        (r"re:.*\d+\d+\.mlp.*", True),
        (r"re:.*\d+\d+\d+\.mlp.*", False),
        (PROJECTION, True),
        ("model.layers.12.mlp.down", False),
    ],
)
def test_a_target_is_a_name_or_a_pattern_of_the_whole_name(pattern: str, fits: bool) -> None:
    assert Targets([["Linear"], [pattern]]).group(PROJECTION) == int(fits)


def test_patterns_mean_what_they_mean_as_regular_expressions() -> None:
    draw = random.Random(3)
    parts = ["a", "b", "1", "7", r"\.", ".", ".*", r"\d+", "(a|ab)", "(b1|b|7)"]
    for _ in range(2000):
        pattern = "".join(draw.choices(parts, k=draw.randrange(1, 7)))
        name = "".join(draw.choices("ab17.", k=draw.randrange(8)))
        fits = re.fullmatch(pattern, name) is not None
        assert Targets([["Linear"], [f"re:{pattern}$"]]).group(name) == int(fits), (pattern, name)


@pytest.mark.parametrize(
    ("pattern", "name"),
    [
        ("(m|m|m|m)(o|o|o|o)(d|d|d|d)(e|e|e|e)" * 40, "mode" * 39 + "x"),
        (r"\d+" * 160 + "x", "1" * 300),
        (".*a" * 2000, "a" * 999),
    ],
)
def test_a_pattern_takes_no_longer_than_its_length(pattern: str, name: str) -> None:
    """Regular expressions would try all ways, for years."""
    assert Targets([["Linear"], [f"re:{pattern}$"]]).group(name) == 0


def test_a_head_without_a_group_of_its_own_is_of_the_class() -> None:
    targets = Targets([["re:.*down_proj"], ["Linear"]])
    assert [targets.group(name) for name in ("lm_head", PROJECTION, "model.layers.0.mlp.up_proj")] == [1, 0, 1]
    assert Targets([["Linear"], ["Embedding"]]).group("model.embed_tokens") == 1


def test_the_first_group_that_names_a_matrix_holds() -> None:
    assert Targets([["Linear"], [PROJECTION], ["re:.*proj"]]).group(PROJECTION) == 1
    assert Targets([["Linear"], ["re:.*proj"], [PROJECTION]]).group(PROJECTION) == 1


def test_bits_of_targets_that_cannot_be_read_are_refused() -> None:
    groups = {str(bits): {"weights": {"num_bits": bits}, "targets": ["re:(a+)+"]} for bits in (4, 8)}
    with pytest.raises(ModelError, match=r"quantization_config has a target that 're:\(a\+\)\+' is not supported"):
        packed_bits({"quantization_config": {"config_groups": groups}})
