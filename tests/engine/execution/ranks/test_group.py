"""The ranks' processes: one engine to its callers, lost together, and gone with the lead, however that ends."""

from __future__ import annotations

import json
import os
import queue
import re
import signal
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch

from engine import Engine, EngineConfig, SamplingParams
from engine.adapters import Adapter, load_adapter
from engine.engine import fingerprint_of
from engine.errors import DeviceLostError, EngineError
from engine.execution.ranks import group
from engine.execution.ranks.group import Group
from engine.kernels.native import load_library
from engine.request import Request
from tests.engine.adapters.folders import tensors, write_adapter
from tests.engine.random_models import VARIANTS, write_model
from tests.limits import bound_memory
from tests.waiting import PATIENCE_S, gone, suspend, until

pytestmark = pytest.mark.skipif(load_library() is None, reason="native kernels are not built for this CPU")

ENDLESS = SamplingParams(max_tokens=400, temperature=0.0, ignore_eos=True)
GREEDY = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("ranks") / "m", seed=5, tokenizer=False, **VARIANTS["gqa"])


def config(ranks: int, **settings: Any) -> EngineConfig:
    return EngineConfig(tensor_parallel=ranks, kv_cache_bytes=1 << 20, threads=1, **settings)


def followers(engine: Engine) -> list[int]:
    assert engine._group is not None
    return [each.process.pid for each in engine._group._followers if each.process is not None]


def test_a_group_is_one_engine_and_a_dead_rank_is_a_lost_device(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    adapter = write_adapter(tmp_path / "adapter")
    prompts = [[1, 2, 3, 4], [5, 6, 7] * 20]
    with Engine.load(folder, config(1)) as alone:
        alone.load_adapter("a", adapter)
        expected, own = alone.generate(prompts, GREEDY), alone.fingerprint
        adapted = alone.generate(prompts, GREEDY, "a")
        assert adapted != expected
    with Engine.load(folder, config(2)) as engine:
        assert [output.token_ids for output in engine.generate(prompts, GREEDY)] == [
            output.token_ids for output in expected
        ]
        assert engine.fingerprint == fingerprint_of(engine._model, 16) != own
        assert engine.stats().rank_processes == (*followers(engine),)
        engine.load_adapter("a", adapter)
        assert [output.token_ids for output in engine.generate(prompts, GREEDY, "a")] == [
            output.token_ids for output in adapted
        ]
        assert engine.unload_adapter("a")

        def load(path: Path, model: Any, max_bytes: int) -> Adapter:
            loaded = load_adapter(path, model, max_bytes)
            write_adapter(path, tensors(seed=9))  # as on a machine that has another one there
            return loaded

        with monkeypatch.context() as patched:
            patched.setattr("engine.engine.load_adapter", load)
            with pytest.raises(EngineError, match=r"rank 1: EngineError: its files are version \w+, and the lead's"):
                engine.load_adapter("other", tmp_path / "adapter")
        assert not engine.adapters
        lost: queue.SimpleQueue[tuple[str, set[str]]] = queue.SimpleQueue()
        engine.on_lost = lambda why, suspects: lost.put((why, suspects))
        events: queue.SimpleQueue[Any] = queue.SimpleQueue()
        engine.submit(Request("a", [1, 2, 3], ENDLESS), events.put)
        events.get(timeout=PATIENCE_S)
        (follower,) = followers(engine)
        for sent in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):  # the lead's to answer
            os.kill(follower, sent)
        events.get(timeout=PATIENCE_S)
        os.kill(follower, signal.SIGKILL)
        why, suspects = lost.get(timeout=PATIENCE_S)
        assert why.endswith(f"rank 1 of 2 (process {follower}): it was killed by SIGKILL")
        assert suspects <= {"a"}
        with pytest.raises(EngineError, match="is not loaded: rank 1 of 2"):
            engine.load_adapter("b", adapter)


@pytest.mark.exhaustive
@pytest.mark.parametrize("ranks", [1, 2])
def test_stages_are_one_engine_and_a_dead_one_is_a_lost_device(ranks: int, folder: Path, tmp_path: Path) -> None:
    adapter = write_adapter(tmp_path / "adapter")
    prompts = [[1, 2, 3, 4], [5, 6, 7] * 20, [9] * 30, [7, 8, 9] * 8]
    settings: dict[str, Any] = {"speculate": "draft", "draft_model": str(folder), "speculate_adaptive": False}
    with Engine.load(folder, config(1)) as alone:
        expected = [output.token_ids for output in alone.generate(prompts, GREEDY)]
    with Engine.load(folder, config(ranks, pipeline_parallel=2, **settings)) as engine:
        engine.load_adapter("a", adapter)
        assert [output.token_ids for output in engine.generate(prompts, GREEDY)] == expected
        assert engine.stats().draft_accepted > 0
        assert [output.token_ids for output in engine.generate(prompts, GREEDY, "a")] != expected
        lost: queue.SimpleQueue[tuple[str, set[str]]] = queue.SimpleQueue()
        engine.on_lost = lambda why, suspects: lost.put((why, suspects))
        events: queue.SimpleQueue[Any] = queue.SimpleQueue()
        for name in "abcd":
            engine.submit(Request(name, [1, 2, 3], ENDLESS), events.put)
        events.get(timeout=PATIENCE_S)
        last = followers(engine)[-1]
        os.kill(last, signal.SIGKILL)
        why, suspects = lost.get(timeout=PATIENCE_S)
        assert why.endswith(f"rank {2 * ranks - 1} of {2 * ranks} (process {last}): it was killed by SIGKILL")
        assert suspects <= set("abcd")
        assert until(lambda: all(map(gone, followers(engine))))


@pytest.mark.exhaustive
def test_a_rank_that_dies_while_nothing_runs_is_noticed_and_takes_the_others_along(folder: Path) -> None:
    with Engine.load(folder, config(4)) as engine:
        lost: queue.SimpleQueue[str] = queue.SimpleQueue()
        engine.on_lost = lambda why, suspects: lost.put(why)
        os.kill(followers(engine)[1], signal.SIGKILL)
        assert "rank 2 of 4" in lost.get(timeout=PATIENCE_S)
        assert until(lambda: all(map(gone, followers(engine))))


@pytest.mark.exhaustive
def test_a_stopped_rank_is_gone_once_the_engine_is_closed_and_keeps_no_caller(folder: Path, tmp_path: Path) -> None:
    engine = Engine.load(folder, config(2))
    (follower,) = followers(engine)
    os.kill(follower, signal.SIGSTOP)
    with ThreadPoolExecutor(1) as threads:
        loading = threads.submit(engine.load_adapter, "a", write_adapter(tmp_path / "adapter"))
        assert until(lambda: engine._loading.locked())
        engine.close()
        with pytest.raises(EngineError, match="is not loaded: the engine is closed"):
            loading.result(timeout=PATIENCE_S)
    assert gone(follower)


@pytest.mark.exhaustive
@pytest.mark.parametrize("stages", [1, 2])
def test_the_rank_for_which_the_others_wait_is_named(stages: int, folder: Path) -> None:
    with Engine.load(folder, config(3 - stages, pipeline_parallel=stages)) as engine:
        (follower,) = followers(engine)
        suspend(follower)
        engine.submit(Request("a", [1, 2, 3], GREEDY), lambda event: None)
        named = f"the others wait for rank 1 of 2 (process {follower}) at "
        assert until(lambda: engine.stats().slow_rank.startswith(named))
        engine.on_lost = lambda why, suspects: None
        os.kill(follower, signal.SIGKILL)


@pytest.mark.exhaustive
@pytest.mark.parametrize("stages", [1, 2])
def test_a_rank_that_stops_before_it_has_its_caches_is_given_up(
    stages: int, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wait = Group.wait

    def stopped(ranks: Group, types: str) -> None:
        wait(ranks, types)
        monkeypatch.setattr(group, "SILENCE_S", 1.0)
        for each in ranks._followers:
            assert each.process is not None
            each.process.send_signal(signal.SIGSTOP)

    monkeypatch.setattr(Group, "wait", stopped)
    with pytest.raises(EngineError, match="not served: to make the KV caches of all ranks takes more than 1 s"):
        Engine.load(folder, config(3 - stages, pipeline_parallel=stages))


@pytest.mark.exhaustive
def test_a_rank_without_memory_for_its_caches_says_so(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wait = Group.wait

    def bounded(ranks: Group, types: str) -> None:
        wait(ranks, types)
        (follower,) = ranks._followers
        assert follower.process is not None
        bound_memory(follower.process.pid, 1 << 20)

    monkeypatch.setattr(Group, "wait", bounded)
    settings = EngineConfig(tensor_parallel=2, kv_cache_bytes=1 << 28, max_num_seqs=4096, threads=1)
    with pytest.raises(EngineError, match=r"not served: rank 1 of 2 \(process \d+\): .*memory"):
        Engine.load(folder, settings)


@pytest.mark.exhaustive
@pytest.mark.parametrize(("stages", "kernels"), [(1, "native"), (2, "native"), (1, "ragged")])
def test_a_rank_without_memory_for_a_step_is_a_lost_device(stages: int, kernels: str, folder: Path) -> None:
    # Steps that are larger than what a process has left of what it freed.
    grid: dict[str, Any] = {"tensor_parallel": 3 - stages, "pipeline_parallel": stages, "kernels": kernels}
    settings = EngineConfig(**grid, threads=1, kv_cache_bytes=1 << 24, max_num_batched_tokens=8192)
    with Engine.load(folder, settings) as engine:
        lost: queue.SimpleQueue[str] = queue.SimpleQueue()
        engine.on_lost = lambda why, suspects: lost.put(why)
        (follower,) = followers(engine)
        engine.generate([[5]], GREEDY)  # loads what is loaded when it is first called
        bound_memory(follower, 0)
        for i in range(16):
            engine.submit(Request(str(i), [5 + i] * 480, GREEDY), lambda event: None)
        # Native kernels end the process, torch raises.
        assert re.search(rf"rank 1 of 2 \(process {follower}\): .*(SIGABRT|[Mm]emory)", lost.get(timeout=PATIENCE_S))


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("kernels", "error"), [("native", MemoryError("no room")), ("ragged", torch.OutOfMemoryError("CUDA out of memory"))]
)
def test_a_lead_without_memory_for_a_step_is_named(
    kernels: str, error: Exception, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: Any) -> NoReturn:
        raise error

    with Engine.load(folder, config(2, kernels=kernels)) as engine:
        lost: queue.SimpleQueue[str] = queue.SimpleQueue()
        engine.on_lost = lambda why, suspects: lost.put(why)
        for model in (engine._model, engine._model.share):
            monkeypatch.setattr(model, "forward", fail)
        engine.submit(Request("a", [5] * 20, GREEDY), lambda event: None)
        assert lost.get(timeout=PATIENCE_S).endswith(f"rank 0 of 2 (the lead): {type(error).__name__}: {error}")


#: A lead that says its follower's process and waits.
_LEAD = """
import sys, threading
from engine import Engine, EngineConfig
with Engine.load(sys.argv[1], EngineConfig(tensor_parallel=2, kv_cache_bytes=1 << 20, threads=1)) as engine:
    print(engine._group._followers[0].process.pid, flush=True)
    threading.Event().wait()
"""


@pytest.mark.exhaustive
@pytest.mark.parametrize("stopped", [False, True])
def test_no_rank_outlives_a_lead_that_is_killed(folder: Path, stopped: bool) -> None:
    with subprocess.Popen([sys.executable, "-P", "-c", _LEAD, str(folder)], stdout=subprocess.PIPE, text=True) as lead:
        try:
            assert lead.stdout is not None
            follower = int(lead.stdout.readline())
            if stopped:
                os.kill(follower, signal.SIGSTOP)
        finally:
            lead.kill()
    assert until(lambda: gone(follower))


def test_a_rank_whose_lead_has_ended_before_it_sent_anything_ends_without_an_error() -> None:
    lead, own = socket.socketpair()
    lead.close()
    with own:
        local = json.dumps({"socket": own.fileno(), "parent": os.getpid()})
        command = [sys.executable, "-P", "-m", "engine.execution.ranks.follower", local]
        ended = subprocess.run(command, pass_fds=(own.fileno(),), capture_output=True, check=False)
    assert (ended.returncode, ended.stderr) == (0, b"")


@pytest.mark.exhaustive
def test_a_rank_that_cannot_come_says_why(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group, "files_of", lambda folder: "those of another version")
    with pytest.raises(EngineError, match=r"rank [123] of 4 \(process \d+\): ModelError: .* its files have changed"):
        Engine.load(folder, config(4))


@pytest.mark.exhaustive
def test_a_rank_of_other_data_types_is_refused_by_name(folder: Path) -> None:
    why = r"rank 1 of 2 \(process \d+\): its data types are 'float32, .* by native-.*', and the lead's 'float16, "
    with closing(Group(folder, config(2), 1, torch.device("cpu"))) as ranks, pytest.raises(EngineError, match=why):
        ranks.wait("float16, computed in float32 by native-1")


def test_a_rank_that_says_nothing_does_not_come(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group, "SILENCE_S", 0.0)
    with (
        closing(Group(folder, config(2), 1, torch.device("cpu"))) as ranks,
        pytest.raises(EngineError, match="rank 1 of 2 has said nothing"),
    ):
        ranks.wait("")
    assert all(each.process is not None and gone(each.process.pid) for each in ranks._followers)


def test_a_rank_that_reports_nonsense_is_a_lost_device(folder: Path) -> None:
    with closing(Group(folder, config(2), 1, torch.device("cpu"))) as ranks:
        until(lambda: bool(ranks._followers))
        ours, theirs = socket.socketpair()
        with ours, theirs:
            for line in (b'{"ready"', b"7", b'{"key": "x"}'):
                theirs.sendall(line + b"\n")
                follower = replace(ranks._followers[0], socket=ours)
                ranks._read(follower)
                assert follower.error.startswith("it sends no report, but ")
        with pytest.raises(EngineError, match=r"rank 1 of 2 .* sends no report, but"):
            ranks.wait("")


def test_the_error_by_which_the_lead_has_failed_is_the_reason_of_the_loss(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(group, "_REASON_S", 0.0)
    monkeypatch.setattr(group, "_CAUSE_S", 0.0)
    with closing(Group(folder, config(2), 1, torch.device("cpu"))) as ranks:
        ranks.check(MemoryError("of a step that ends nobody"))
        assert ranks.exchange is not None
        ranks.exchange.fail()
        with pytest.raises(DeviceLostError, match="the others wait for it no more"):  # who says so knows no more
            ranks.exchange.check()
        with pytest.raises(DeviceLostError, match=r"^rank 0 of 2 \(the lead\): MemoryError: no room$"):
            ranks.check(MemoryError("no room"))
