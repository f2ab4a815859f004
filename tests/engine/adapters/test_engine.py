"""Adapters of a running engine: loaded, used beside each other and unloaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from engine import Engine, EngineConfig, EngineError, ModelError, Request, RequestError, SamplingParams
from engine.errors import NOT_FINITE
from engine.kernels.native import load_library
from tests.engine.adapters.folders import tensors, too_large, write_adapter
from tests.engine.deterministic.logits import recorded
from tests.engine.looping import Listener
from tests.engine.random_models import write_model

GREEDY = SamplingParams(max_tokens=16, temperature=0.0, ignore_eos=True)
PROMPT = list(range(3, 43))


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return write_model(tmp_path / "base")


def test_each_request_has_its_own_adapter_and_shares_no_cache_with_others(base: Path, tmp_path: Path) -> None:
    with Engine.load(base, EngineConfig(block_size=4)) as engine:
        for i, name in enumerate(("one", "two")):
            engine.load_adapter(name, write_adapter(tmp_path / name, tensors(seed=i)))
        first = {name: engine.generate([PROMPT], GREEDY, name)[0] for name in ("", "one", "two")}
        assert len({tuple(output.token_ids) for output in first.values()}) == 3
        assert {output.cached_tokens for output in first.values()} == {0}
        again = {name: engine.generate([PROMPT], GREEDY, name)[0] for name in first}
        assert {output.cached_tokens for output in again.values()} == {36}
        for name, output in again.items():
            assert output.token_ids == first[name].token_ids


def test_a_row_depends_on_no_other_to_the_bit(base: Path, tmp_path: Path) -> None:
    """Alone, and in steps with rows of other adapters and of none: native kernels promise it."""
    if load_library() is None:
        pytest.skip("native kernels are not built for this CPU")
    prompts = {"": list(range(5, 40)), "one": list(range(9, 30)), "two": list(range(2, 52))}
    with Engine.load(base, EngineConfig(deterministic=True)) as engine, recorded():
        for i, name in enumerate(("one", "two")):
            engine.load_adapter(name, write_adapter(tmp_path / name, tensors(seed=i, rank=2 + i)))
        alone = {name: engine.generate([prompt], GREEDY, name)[0].token_ids for name, prompt in prompts.items()}
        listeners = {name: Listener() for name in prompts}
        for name, prompt in prompts.items():
            engine.submit(Request(f"of {name}", prompt, GREEDY, salt="anew", adapter=name), listeners[name])
        for name, listener in listeners.items():
            assert [token for event in listener.wait().events for token in event.token_ids] == alone[name]


@pytest.mark.parametrize("kernels", ["auto", "sdpa", "ragged"])
def test_one_whose_hidden_states_overflow_fails_its_request_alone(kernels: Any, base: Path, tmp_path: Path) -> None:
    """A norm of numbers whose squares overflow would be 0, and 0 the first token."""
    with Engine.load(base, EngineConfig(kernels=kernels, kv_cache_bytes=1 << 18)) as engine:
        engine.load_adapter("huge", write_adapter(tmp_path / "huge", too_large()))
        expected = engine.generate([PROMPT], GREEDY)[0].token_ids
        listeners = {name: Listener() for name in ("huge", "")}
        for name, listener in listeners.items():
            engine.submit(Request(f"of {name}", PROMPT, GREEDY, salt="anew", adapter=name), listener)
        (failed,) = listeners["huge"].wait().events
        assert (failed.error, failed.token_ids, failed.done) == (NOT_FINITE, [], True)
        assert [token for event in listeners[""].wait().events for token in event.token_ids] == expected


def test_a_name_that_is_not_loaded_is_refused(base: Path, tmp_path: Path) -> None:
    with Engine.load(base) as engine:
        with pytest.raises(RequestError, match="adapter='mine' is not loaded; none is") as refused:
            engine.generate([PROMPT], GREEDY, "mine")
        assert refused.value.param == "adapter"
        engine.load_adapter("yours", write_adapter(tmp_path / "yours"))
        with pytest.raises(RequestError, match="adapter='mine' is not loaded; loaded are yours"):
            engine.generate([PROMPT], GREEDY, "mine")


def test_a_request_goes_on_with_its_adapter_when_that_is_unloaded(base: Path, tmp_path: Path) -> None:
    params = SamplingParams(max_tokens=200, temperature=0.0, ignore_eos=True)
    with Engine.load(base) as engine:
        engine.load_adapter("mine", write_adapter(tmp_path / "mine"))
        whole = engine.generate([PROMPT], params, "mine")[0].token_ids
        listener = Listener()
        engine.submit(Request("a", PROMPT, params, adapter="mine"), listener)
        assert engine.unload_adapter("mine")
        assert not engine.unload_adapter("mine")
        assert engine.adapters == {}
        tokens = [token for event in listener.wait().events for token in event.token_ids]
        assert tokens == whole


def test_a_name_stands_for_one_adapter_at_a_time(base: Path, tmp_path: Path) -> None:
    with Engine.load(base) as engine:
        mine = write_adapter(tmp_path / "mine")
        engine.load_adapter("mine", mine)
        engine.load_adapter("mine", mine)  # the same once more
        with pytest.raises(EngineError, match="an adapter named 'mine' is loaded already; unload it first"):
            engine.load_adapter("mine", write_adapter(tmp_path / "other", tensors(seed=1)))


def test_loaded_adapters_stay_within_their_memory(base: Path, tmp_path: Path) -> None:
    size = 4 * sum(value.numel() for value in tensors().values())
    with Engine.load(base, EngineConfig(adapter_bytes=2 * size - 1)) as engine:
        engine.load_adapter("one", write_adapter(tmp_path / "one"))
        with pytest.raises(ModelError, match=f"there is room for {size - 1}"):
            engine.load_adapter("two", write_adapter(tmp_path / "two", tensors(seed=1)))
        engine.unload_adapter("one")
        engine.load_adapter("two", tmp_path / "two")
