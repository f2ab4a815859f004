"""Engines that share a device take turns: who computes is decided by shares, and no death keeps the others waiting."""

from __future__ import annotations

import random
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from itertools import count, pairwise
from pathlib import Path

import pytest

from engine.errors import EngineError
from engine.execution import turns
from engine.execution.loop import StepLoop
from engine.execution.turns import Turns
from engine.kv import KvSpace
from engine.plan import StepPlan
from engine.scheduling.scheduler import Scheduler
from tests.engine.looping import PATIENCE, Gate, Listener, Steps, request, until, waited
from tests.engine.stepping import made
from tests.histories import seeds


class Clock:
    """The time of steps: it passes only while one runs."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        monkeypatch.setattr(turns, "monotonic", lambda: self.now)


def stepped(clock: Clock, members: dict[str, tuple[Turns, float]], rounds: int) -> list[str]:
    """The order in which members make steps while all have work. A member: its turns, and the time of its step."""
    order: list[str] = []
    over = threading.Event()

    def work(name: str, turns: Turns, seconds: float) -> None:
        while True:
            turns.take(over.is_set)
            if not turns.holds:
                return
            until(lambda: int(turns._members["waits"].sum()) == len(members) - 1 or over.is_set())
            order.append(name)
            clock.now += seconds
            turns.charge()
            if len(order) >= rounds:
                over.set()
            if turns.due() or over.is_set():
                turns.hand_over()
            if over.is_set():
                return

    threads = [threading.Thread(target=work, args=(name, *member)) for name, member in members.items()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
        assert not thread.is_alive()
    return order


def test_time_is_shared_by_weight_however_long_each_ones_steps_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock(monkeypatch)
    decoder, other = Turns(tmp_path, 0.7), Turns(tmp_path, 0.3)
    order = stepped(clock, {"decoder": (decoder, 1.0), "other": (other, 6.0)}, 200)
    seconds = {"decoder": 1.0 * order.count("decoder"), "other": 6.0 * order.count("other")}
    assert seconds["decoder"] / sum(seconds.values()) == pytest.approx(0.7, abs=0.03)


def test_a_batch_keeps_a_decoder_waiting_once_at_most(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Even where batches are so short that the share would let several run."""
    clock = Clock(monkeypatch)
    decoder, batches = Turns(tmp_path, 0.5), Turns(tmp_path, 0.5, batches=True)
    order = stepped(clock, {"decoder": (decoder, 8.0), "batch": (batches, 1.0)}, 24)
    pairs = Counter(pairwise(order))
    assert pairs["batch", "batch"] == 0
    assert pairs["decoder", "batch"] > 5


def test_one_that_was_idle_has_saved_nothing_up_and_left_all_to_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock(monkeypatch)
    busy, idle = Turns(tmp_path, 0.5), Turns(tmp_path, 0.5)
    for _ in range(100):
        assert not busy.take(), "nobody else wants it"
        clock.now += 1.0
        busy.charge()
        assert not busy.due()
    busy.hand_over()
    order = stepped(clock, {"busy": (busy, 1.0), "idle": (idle, 1.0)}, 20)
    assert abs(order.count("busy") - order.count("idle")) <= 2


#: Where a new process finds the packages.
ROOT = Path(__file__).parents[3]
HOLDS = """
import sys, time
from engine.execution.turns import Turns
turns = Turns(sys.argv[1], 0.5)
turns.take()
print("holds", flush=True)
time.sleep(600)
"""


def test_the_turn_of_a_process_that_was_killed_passes_on_and_so_does_its_entry(tmp_path: Path) -> None:
    process = subprocess.Popen([sys.executable, "-P", "-c", HOLDS, str(tmp_path)], stdout=subprocess.PIPE, cwd=ROOT)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == b"holds\n"
        ours = Turns(tmp_path, 0.5)
        thread = threading.Thread(target=ours.take)
        thread.start()
        until(lambda: bool(ours._members["waits"][ours._member]))
        assert not ours.holds
    finally:
        process.kill()
        process.wait()
        process.stdout.close()  # type: ignore[union-attr]
    thread.join(PATIENCE)
    assert ours.holds
    assert Turns(tmp_path, 0.5)._member == 0, "the entry of the one that died"
    ours.close()


def test_a_folder_that_is_none_or_full_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(EngineError, match=r"turns='.*nowhere' cannot be used: .*No such file"):
        Turns(tmp_path / "nowhere", 1.0)
    monkeypatch.setattr(turns, "MEMBERS", 2)
    both = [Turns(tmp_path, 0.5), Turns(tmp_path, 0.5)]
    with pytest.raises(EngineError, match="has 2 members already"):
        Turns(tmp_path, 0.5)
    both[0].close()
    Turns(tmp_path, 0.5).close()


# ---- loops


def scheduler() -> Scheduler:
    return made(spaces=[KvSpace(32)], block_size=4, max_num_seqs=4, max_num_batched_tokens=16, max_model_len=64)


class Pair:
    """Two loops that share a device. `computing`: the most steps that ever ran at once."""

    def __init__(self, folder: Path, overlap: int) -> None:
        self.steps = Steps(late=False), Steps(late=False)
        self._lock, self._now, self.computing = threading.Lock(), 0, 0
        for steps in self.steps:
            self._count(steps)
        self.loops = [
            StepLoop(scheduler(), steps, lambda: None, overlap=overlap, turns=Turns(folder, 0.5))
            for steps in self.steps
        ]

    def _count(self, steps: Steps) -> None:
        launch, collect = steps.launch, steps.collect

        def launched(plan: StepPlan) -> object:
            with self._lock:
                # A loop's own steps overlap; another's must have been collected.
                self.computing = max(self.computing, sum(each.ahead > 0 for each in self.steps if each is not steps))
            return launch(plan)

        steps.launch, steps.collect = launched, collect  # type: ignore[method-assign,assignment]

    def close(self) -> None:
        for loop in self.loops:
            loop.close()


@pytest.fixture(params=[0, 1], ids=["synchronous", "overlapping"])
def pair(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Pair]:
    pair = Pair(tmp_path, request.param)
    yield pair
    pair.close()


def test_steps_of_two_engines_never_overlap_and_all_end(pair: Pair) -> None:
    heard = []
    for name in "abcd":
        for loop in pair.loops:
            heard.append(Listener())
            loop.submit(request(name, max_tokens=20), heard[-1])
    assert all(listener.wait().tokens == list(range(11, 31)) for listener in heard)
    assert pair.computing == 0
    assert all(steps.ahead == 0 for steps in pair.steps)


def test_an_engine_that_waits_for_anothers_step_is_in_none_and_can_be_closed(pair: Pair) -> None:
    """Its step's limit must not count what another's step hangs."""
    gate = Gate()
    pair.steps[0].before = gate
    hung, late = Listener(), Listener()
    pair.loops[0].submit(request("hung"), hung)
    gate.wait()
    pair.loops[1].submit(request("late"), late)
    turns = pair.loops[1]._turns
    assert turns is not None
    until(lambda: bool(turns._members["waits"][turns._member]))
    assert pair.loops[0].stepping()[1] == {"hung"}
    assert pair.loops[1].stepping() == (0.0, set())
    pair.loops[1].close()
    waited(late.done)
    assert late.events[-1].finish_reason == "abort"
    gate.open()
    hung.wait()


def test_a_device_step_that_fails_before_the_turn_is_handed_over_is_computed_again(tmp_path: Path) -> None:
    pair = Pair(tmp_path, overlap=1)
    other, turns = pair.loops[1]._turns, pair.loops[0]._turns
    assert other is not None
    assert turns is not None
    fails, gate = [True], Gate()
    pair.steps[0].before = gate
    collect = pair.steps[0].collect

    def failing(launched: object) -> object:
        made = collect(launched)  # type: ignore[arg-type]
        if fails[0] and turns.due():
            fails[0] = False
            raise RuntimeError("a step failed")
        return made

    pair.steps[0].collect = failing  # type: ignore[method-assign,assignment]
    first, second = Listener(), Listener()
    pair.loops[0].submit(request("a", max_tokens=40), first)
    gate.wait()
    pair.loops[1].submit(request("b", max_tokens=40), second)
    until(lambda: bool(other._members["waits"][other._member]))
    gate.open()
    assert first.wait().tokens == list(range(11, 51))
    assert second.wait().tokens == list(range(11, 51))
    assert not fails[0]
    pair.close()


def test_work_for_idle_times_takes_a_turn(tmp_path: Path) -> None:
    """It computes, too: decode steps are recorded on a GPU."""
    other = Turns(tmp_path, 0.5)
    other.take()
    begun = threading.Event()

    def idle() -> bool:
        assert ours.holds
        begun.set()
        return False

    ours = Turns(tmp_path, 0.5)
    loop = StepLoop(scheduler(), Steps(late=False), lambda: None, on_idle=idle, turns=ours)
    until(lambda: bool(other._members["waits"][ours._member]))
    assert not begun.is_set()
    other.hand_over()
    waited(begun)
    loop.close()


def test_work_for_idle_times_leaves_others_their_turns(tmp_path: Path) -> None:
    ours, other = Turns(tmp_path, 0.5), Turns(tmp_path, 0.5)
    had, ended = threading.Event(), threading.Event()
    calls: list[bool] = []

    def step() -> None:
        other.take()
        had.set()
        other.hand_over()

    thread = threading.Thread(target=step)

    def idle() -> bool:
        calls.append(had.is_set())
        if len(calls) == 1:
            thread.start()
            until(lambda: bool(other._members["waits"][other._member]))
        if len(calls) == 3:
            ended.set()
        return len(calls) < 3

    loop = StepLoop(scheduler(), Steps(late=False), lambda: None, on_idle=idle, turns=ours)
    waited(ended)
    loop.close()
    thread.join(PATIENCE)
    assert calls == [False, True, True]


WORKS = """
import fcntl, os, sys, time
from engine.execution.turns import Turns
folder, name, batches = sys.argv[1:]
turns = Turns(folder, 0.5, batches=batches == "1")
device = os.open(folder + "/device", os.O_RDWR | os.O_CREAT)
steps, count = os.open(folder + "/" + name, os.O_RDWR | os.O_CREAT), 0
while True:
    turns.take()
    fcntl.flock(device, fcntl.LOCK_EX | fcntl.LOCK_NB)
    time.sleep(0.0005)
    fcntl.flock(device, fcntl.LOCK_UN)
    count += 1
    os.pwrite(steps, b"%d" % count, 0)
    turns.charge()
    if turns.due() or os.urandom(1)[0] < 20:  # another is due, or there is nothing to do
        turns.hand_over()
"""


@pytest.mark.exhaustive
@pytest.mark.parametrize("seed", seeds(1))
def test_whoever_is_killed_wherever_the_others_go_on_one_at_a_time(tmp_path: Path, seed: int) -> None:
    draw, names = random.Random(seed), count()

    class Member:
        def __init__(self) -> None:
            self.steps = tmp_path / f"steps.{next(names)}"
            self.steps.touch()
            argv = [sys.executable, "-P", "-c", WORKS, str(tmp_path), self.steps.name, draw.choice("01")]
            self.process = subprocess.Popen(argv, stderr=subprocess.PIPE, cwd=ROOT)

        def goes_on(self) -> bool:
            assert self.process.poll() is None, self.end()
            return int(self.steps.read_text() or 0) >= wanted[self]

        def end(self) -> bytes:
            self.process.kill()
            return self.process.communicate()[1]

    members = [Member() for _ in range(3)]
    wanted: dict[Member, int] = {}
    try:
        for _ in range(40):
            wanted = {member: int(member.steps.read_text() or 0) + draw.randrange(1, 20) for member in members}
            until(lambda: all(member.goes_on() for member in members))
            victim = draw.randrange(3)
            assert members[victim].end() == b""
            members[victim] = Member()
    finally:
        for member in members:
            member.end()
