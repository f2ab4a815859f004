from __future__ import annotations

import math

import pytest

from engine.config import EngineConfig
from engine.errors import EngineError


def test_the_defaults_are_valid_and_cannot_be_changed():
    config = EngineConfig()
    assert (config.dtype, config.device, config.max_num_seqs, config.block_size) == ("auto", "auto", None, 16)
    with pytest.raises(AttributeError):
        config.block_size = 8


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("dtype", "int8"),
        ("device", "tpu"),
        ("quantization", "int4"),
        ("quantization", None),
        ("max_num_seqs", 0),
        ("max_num_seqs", True),
        ("max_num_seqs", 2.0),
        ("max_num_batched_tokens", 0),
        ("max_non_priority_step_tokens", 0),
        ("kv_cache_bytes", 0),
        ("block_size", 0),
        ("block_size", "16"),
        ("max_model_len", 1),
        ("ageing_s", 0),
        ("ageing_s", -1.0),
        ("ageing_s", math.nan),
        ("ageing_s", math.inf),
        ("ageing_s", "30"),
        ("threads", 0),
        ("seed", -1),
        ("overlap", 2),
        ("overlap", -1),
        ("overlap", True),
        ("enable_prefix_caching", "yes"),
        ("kernels", "cuda"),
        ("graphs", 1),
        ("memory_share", 0.0),
        ("memory_share", 1.01),
        ("memory_share", True),
        ("memory_share", math.nan),
        ("draft_model", 3),
        ("draft_model", ""),
    ],
)
def test_a_bad_setting_is_refused_by_name_and_value(name, value):
    with pytest.raises(EngineError, match=name) as caught:
        EngineConfig(**{name: value})
    assert repr(value) in str(caught.value)


@pytest.mark.parametrize("name", ["max_num_batched_tokens", "max_non_priority_step_tokens"])
def test_a_step_holds_a_token_of_each_sequence_that_was_asked_for(name):
    with pytest.raises(EngineError, match=f"{name}=63 is less than max_num_seqs=64"):
        EngineConfig(max_num_seqs=64, **{name: 63})


def test_a_draft_model_is_for_speculation_and_said_alone_means_it():
    assert (EngineConfig().speculate, EngineConfig(draft_model="d").speculate) == ("none", "draft")
    with pytest.raises(EngineError, match="goes with speculate='draft'"):
        EngineConfig(speculate="none", draft_model="d")
