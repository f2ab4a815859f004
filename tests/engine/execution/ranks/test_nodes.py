"""Stages on several machines, here as processes that know each other by sockets alone."""

from __future__ import annotations

import ctypes
import os
import queue
import signal
import socket
import struct
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from engine import Engine, EngineConfig, SamplingParams
from engine.errors import DeviceLostError, EngineError
from engine.execution.ranks import group, meeting, nodes
from engine.execution.ranks.group import Group
from engine.execution.ranks.meeting import Meeting, join, read_secret
from engine.execution.ranks.nodes import Node, SocketLink, differing, gather, traits_of
from engine.kernels.native import load_library
from engine.request import Request
from tests.engine.random_models import VARIANTS, write_model
from tests.waiting import PATIENCE_S, gone, suspend, until

pytestmark = pytest.mark.skipif(load_library() is None, reason="native kernels are not built for this CPU")


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
    return port


SECRET = b"a secret of many bytes"
GREEDY = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
PROMPTS = [[1, 2, 3, 4], [5, 6, 7] * 20, [9] * 30]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("nodes") / "m", seed=5, tokenizer=False, **VARIANTS["gqa"])


@pytest.fixture(autouse=True)
def _patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of both sides with each other, on a machine that may be busy."""
    monkeypatch.setattr(meeting, "GREET_S", 60.0)


@pytest.fixture
def secret(tmp_path: Path) -> str:
    (tmp_path / "secret").write_bytes(SECRET + b"\n")
    return str(tmp_path / "secret")


@pytest.fixture
def port_of_lead() -> Iterator[Meeting]:
    made = Meeting(f"127.0.0.1:{free_port()}", SECRET)
    yield made
    made.close()


def config(secret: str, port: int, **settings: Any) -> EngineConfig:
    return EngineConfig(
        kv_cache_bytes=1 << 20, threads=1, ranks_address=f"127.0.0.1:{port}", ranks_secret=secret, **settings
    )


def alone(folder: Path, kernels: str = "auto") -> list[list[int]]:
    with Engine.load(folder, EngineConfig(kv_cache_bytes=1 << 20, threads=1, kernels=kernels)) as engine:
        return [output.token_ids for output in engine.generate(PROMPTS, GREEDY)]


def started(pool: ThreadPoolExecutor, part: Node) -> Future[bool]:
    return pool.submit(part.run)


@pytest.mark.parametrize(
    ("divided", "kernels"),
    [
        ("pipeline_parallel", "native"),
        pytest.param("tensor_parallel", "native", marks=pytest.mark.exhaustive),
        pytest.param("tensor_parallel", "ragged", marks=pytest.mark.exhaustive),
        pytest.param("pipeline_parallel", "ragged", marks=pytest.mark.exhaustive),
    ],
)
def test_two_machines_are_one_engine_and_a_lost_rank_is_named(
    divided: str, kernels: str, folder: Path, secret: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With kernels "ragged" by torch.distributed, as between GPUs, where CPUs may differ."""
    monkeypatch.setattr(group, "_REASON_S", 60.0)  # of a machine that may be busy
    if kernels == "ragged":
        monkeypatch.setattr(nodes, "traits_of", lambda folder: {**traits_of(folder), "instruction set": "avx"})
    # Who is told of the loss closes the engine, before the group has ended all that it ends then.
    closed, close, kill = threading.Event(), nodes.Joined.close, group._Follower.kill

    def closing(joined: nodes.Joined, **how: Any) -> None:
        close(joined, **how)
        closed.set()

    def late(follower: group._Follower) -> None:
        closed.wait(PATIENCE_S)
        kill(follower)

    monkeypatch.setattr(nodes.Joined, "close", closing)
    monkeypatch.setattr(group._Follower, "kill", late)
    port = free_port()
    part = Node(folder, ("127.0.0.1", port), 1, SECRET, threads=1)
    with ThreadPoolExecutor(1) as pool:
        running = started(pool, part)
        with Engine.load(folder, config(secret, port, nodes=2, kernels=kernels, **{divided: 2})) as engine:
            assert [output.token_ids for output in engine.generate(PROMPTS, GREEDY)] == alone(folder, kernels)
            lost: queue.SimpleQueue[str] = queue.SimpleQueue()
            engine.on_lost = lambda why, suspects: lost.put(why)
            events: queue.SimpleQueue[Any] = queue.SimpleQueue()
            endless = SamplingParams(max_tokens=400, temperature=0.0, ignore_eos=True)
            engine.submit(Request("a", [1, 2, 3], endless), events.put)
            events.get(timeout=PATIENCE_S)
            (process,) = part._processes.values()
            os.kill(process.pid, signal.SIGKILL)
            assert lost.get(timeout=PATIENCE_S).endswith("rank 1 of 2 (on node 1): it was killed by SIGKILL")
        assert running.result(timeout=PATIENCE_S) is False


@pytest.mark.exhaustive
@pytest.mark.parametrize("kernels", ["native", "ragged"])
def test_two_stages_of_two_machines_each(kernels: str, folder: Path, secret: str) -> None:
    ports = [free_port() for _ in range(4)]
    parts = [
        Node(folder, ("127.0.0.1", ports[0]), node, SECRET, listen=f"127.0.0.1:{ports[node]}", threads=1)
        for node in (1, 2, 3)
    ]
    with ThreadPoolExecutor(3) as pool:
        running = [started(pool, part) for part in parts]
        settings = config(secret, ports[0], nodes=4, tensor_parallel=2, pipeline_parallel=2, kernels=kernels)
        with Engine.load(folder, settings) as engine:
            assert [output.token_ids for output in engine.generate(PROMPTS, GREEDY)] == alone(folder, kernels)
        assert [each.result(timeout=PATIENCE_S) for each in running] == [True] * 3


@pytest.mark.exhaustive
def test_the_rank_that_is_lost_is_named_and_not_who_says_that_one_is(
    folder: Path, secret: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(group, "_REASON_S", 60.0)
    monkeypatch.setattr(group, "_CAUSE_S", 60.0)
    changes = VARIANTS["gqa"] | {"num_hidden_layers": 3}
    folder = write_model(folder.parent / "three", seed=5, tokenizer=False, **changes)
    read, reported = Group._read, threading.Event()

    def later(own: Group, follower: group._Follower) -> bool:
        """The end of rank 1 is read once rank 2 has said that its link to rank 1 is lost."""
        if follower.rank == 1 and follower.ready and not reported.is_set():
            return True
        more = read(own, follower)
        if follower.rank == 2 and follower.lost:
            reported.set()
        return more

    port, address = free_port(), f"127.0.0.1:{free_port()}"
    others = [
        Node(folder, ("127.0.0.1", port), 1, SECRET, listen=address, threads=1),
        Node(folder, ("127.0.0.1", port), 2, SECRET, threads=1),
    ]
    with ThreadPoolExecutor(2) as pool:
        running = [started(pool, each) for each in others]
        with Engine.load(folder, config(secret, port, nodes=3, pipeline_parallel=3)) as engine:
            lost: queue.SimpleQueue[str] = queue.SimpleQueue()
            engine.on_lost = lambda why, suspects: lost.put(why)
            monkeypatch.setattr(Group, "_read", later)
            (process,) = others[0]._processes.values()
            os.kill(process.pid, signal.SIGKILL)
            assert lost.get(timeout=PATIENCE_S).endswith("rank 1 of 3 (on node 1): it was killed by SIGKILL")
        assert [each.result(timeout=PATIENCE_S) for each in running] == [False, False]


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("ranks", "stages", "machines", "kernels"),
    [
        *((2, 4, 2, "native"), (1, 3, 3, "native"), (1, 4, 2, "native"), (4, 1, 2, "native"), (4, 1, 4, "native")),
        *((2, 2, 2, "ragged"), (4, 1, 2, "ragged"), (1, 3, 3, "ragged")),
    ],
)
def test_chains_of_machines(ranks: int, stages: int, machines: int, kernels: str, secret: str, tmp_path: Path) -> None:
    changes = VARIANTS["gqa"] | {"num_hidden_layers": 5}
    folder = write_model(tmp_path / "m", seed=5, tokenizer=False, **changes)
    port, own = free_port(), [free_port() for _ in range(machines)]
    with ThreadPoolExecutor(machines) as pool:
        others = [
            started(pool, Node(folder, ("127.0.0.1", port), i, SECRET, listen=address, threads=1))
            for i in range(1, machines)
            for address in ("" if i + 1 == machines else f"127.0.0.1:{own[i]}",)
        ]
        settings = {"tensor_parallel": ranks, "pipeline_parallel": stages, "nodes": machines}
        with Engine.load(folder, config(secret, port, kernels=kernels, **settings)) as engine:
            assert [output.token_ids for output in engine.generate(PROMPTS, GREEDY)] == alone(folder, kernels)
        assert [each.result(timeout=PATIENCE_S) for each in others] == [True] * (machines - 1)


@pytest.mark.exhaustive
@pytest.mark.parametrize("divided", ["tensor_parallel", "pipeline_parallel"])
def test_a_slow_rank_of_another_machine_is_named(divided: str, folder: Path, secret: str) -> None:
    port = free_port()
    part = Node(folder, ("127.0.0.1", port), 1, SECRET, threads=1)
    with ThreadPoolExecutor(1) as pool:
        running = started(pool, part)
        with Engine.load(folder, config(secret, port, nodes=2, **{divided: 2})) as engine:
            (process,) = part._processes.values()
            suspend(process.pid)
            engine.submit(Request("a", [1, 2, 3], GREEDY), lambda event: None)
            named = "the others wait for rank 1 of 2 (on node 1) at "
            assert until(lambda: engine.stats().slow_rank.startswith(named))
            engine.on_lost = lambda why, suspects: None
            os.kill(process.pid, signal.SIGKILL)
        assert running.result(timeout=PATIENCE_S) is False


@pytest.mark.exhaustive
def test_a_machine_whose_lead_is_gone_ends_its_ranks(folder: Path, port_of_lead: Meeting) -> None:
    """Also one of them that is stopped."""
    part = Node(folder, ("127.0.0.1", port_of_lead.port), 1, SECRET, threads=1)
    with ThreadPoolExecutor(1) as pool:
        running = started(pool, part)
        told = {"ranks": 1, "stages": 2, "nodes": 2, "device": "cpu", "backend": None}
        joined = gather(port_of_lead, 2, 1, traits_of(folder), told, lambda: False, stages=2)
        assert until(lambda: bool(part._processes))
        (process,) = part._processes.values()
        os.kill(process.pid, signal.SIGSTOP)
        for end in (*joined.nodes.values(), *joined.ranks.values()):
            end.close()
        assert running.result(timeout=PATIENCE_S) is False
        assert until(lambda: gone(process.pid))


@pytest.mark.parametrize(
    ("trait", "value", "why"),
    [
        (
            "release",
            "penstock 0.1",
            r"its release is 'penstock 0.1', and the lead's 'penstock .* \(code \w{8}\), kernels",
        ),
        ("instruction set", "avx", "its instruction set is 'avx', and the lead's"),
        ("model's files", "others", "its model's files is 'others', and the lead's"),
        ("clock", 12.0, r"its clock is \d+ s off the lead's"),
        ("clock", float("nan"), r"its clock is nan s off"),
    ],
)
def test_a_machine_that_differs_is_refused_by_name(
    trait: str, value: Any, why: str, folder: Path, port_of_lead: Meeting, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = traits_of(folder)
    monkeypatch.setattr(nodes, "traits_of", lambda folder: {**own, trait: value} if trait in own else own)
    clock = {"clock": lambda: value}.get(trait, time.time)
    with ThreadPoolExecutor(1) as pool:
        node = Node(folder, ("127.0.0.1", port_of_lead.port), 1, SECRET, clock=clock)
        running = started(pool, node)
        with pytest.raises(EngineError, match=rf"node 1 of 2 \(127.0.0.1\) does not fit: {why}"):
            gather(port_of_lead, 2, 1, own, {}, lambda: False, stages=2)
        with pytest.raises(EngineError, match=f"the lead refuses this machine: {why}"):
            running.result(timeout=PATIENCE_S)


def test_until_all_have_come_a_machine_may_go_and_come_again(
    port_of_lead: Meeting, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """What comes too early, or with a number that another machine has, is turned away, and the lead waits on."""
    monkeypatch.setattr(nodes, "CONNECT_S", -4.0)
    caplog.set_level("INFO", "penstock.engine")
    address = ("127.0.0.1", port_of_lead.port)

    def come(purpose: str, node: int) -> socket.socket:
        said = {"purpose": purpose, "node": node, "traits": {"clock": time.time()}}
        return join(address, SECRET, said, 5.0, "the lead")

    with ThreadPoolExecutor(1) as pool, ExitStack() as ends:
        waiting = pool.submit(gather, port_of_lead, 3, 1, {}, {}, lambda: False, stages=2)
        for _ in range(2):
            come("node", 1).close()
        early = ends.enter_context(come("rank", 1))
        assert b"it comes before its machine" in early.recv(1024)
        ends.enter_context(come("node", 1))
        second = ends.enter_context(come("node", 1))
        assert b"another machine, 127.0.0.1, is node 1 already" in second.recv(1024)
        ends.enter_context(come("node", 2))
        with pytest.raises(EngineError, match="rank 1, rank 2: not connected in 1 s though"):
            waiting.result(timeout=PATIENCE_S)
    assert "Node 1 (127.0.0.1) has ended before all have come; it is waited for again" in caplog.text
    assert "Node 1 of 3 (127.0.0.1) has come; to come: 2" in caplog.text


def test_a_machine_that_waits_for_the_lead_tells_its_clock_when_that_has_come(
    folder: Path, port_of_lead: Meeting, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Either may start first."""
    clock = count(1000.0, 60.0)
    hellos: list[Any] = []

    def connected(address: object, secret: object, hello: Any, timeout_s: float, peer: str) -> socket.socket:
        next(clock)
        hellos.append(hello())
        raise EngineError("enough")

    monkeypatch.setattr(nodes, "join", connected)
    with pytest.raises(EngineError, match="enough"):
        Node(folder, ("127.0.0.1", port_of_lead.port), 1, SECRET, clock=lambda: next(clock)).run()
    assert hellos[0]["traits"]["clock"] == 1060.0


def test_a_machine_whose_number_is_still_held_calls_again_until_it_is_free(
    folder: Path, port_of_lead: Meeting, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As that of one which was cut off is, until the lead has noticed."""
    monkeypatch.setattr(nodes, "_AGAIN_S", 0.0)
    monkeypatch.setattr(nodes, "CONNECT_S", -4.0)
    caplog.set_level("INFO", "penstock.engine")
    address = ("127.0.0.1", port_of_lead.port)

    def come(node: int) -> socket.socket:
        said = {"purpose": "node", "node": node, "traits": {"clock": time.time()}}
        return join(address, SECRET, said, 5.0, "the lead")

    with ThreadPoolExecutor(2) as pool, ExitStack() as ends:
        waiting = pool.submit(gather, port_of_lead, 3, 1, {}, {"dtype": "float32"}, lambda: False, stages=2)
        before = come(1)
        again = Node(folder, address, 1, SECRET)  # its connection lasts as long
        coming = pool.submit(again._call)
        assert until(lambda: caplog.text.count("which calls again in 0 s: another machine, 127.0.0.1, is node 1") > 1)
        before.close()
        assert until(lambda: caplog.text.count("Node 1 of 3 (127.0.0.1) has come; to come: 2") == 2)
        ends.enter_context(come(2))
        assert coming.result(timeout=PATIENCE_S) == {"dtype": "float32", "link": None, "peers": []}
        with pytest.raises(EngineError, match="not connected"):
            waiting.result(timeout=PATIENCE_S)


def reset() -> socket.socket:
    """A connection whose other machine is cut off."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        end = socket.create_connection(listener.getsockname())
        other, _ = listener.accept()
        other.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        other.close()
    return end


def test_a_machine_that_waits_for_its_part_calls_again_where_the_lead_is_cut_off(
    folder: Path, port_of_lead: Meeting, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also in the middle of a line."""
    monkeypatch.setattr(nodes, "_AGAIN_S", 0.0)
    pairs = [socket.socketpair() for _ in range(2)]
    for (_, lead), line in zip(pairs, (b'{"dtype": "flo', b'{"dtype": "float32"}\n'), strict=True):
        lead.sendall(line)
        lead.close()
    connections = iter([reset(), *(end for end, _ in pairs)])
    monkeypatch.setattr(nodes, "join", lambda *how: next(connections))
    node = Node(folder, ("127.0.0.1", port_of_lead.port), 1, SECRET)
    assert node._call() == {"dtype": "float32"}


def test_a_machine_that_is_cut_off_before_it_has_its_part_is_named(
    port_of_lead: Meeting, monkeypatch: pytest.MonkeyPatch
) -> None:
    hello = {"purpose": "node", "node": 1, "traits": {"clock": time.time()}}
    monkeypatch.setattr(port_of_lead, "next", lambda: (reset(), hello))
    with pytest.raises(EngineError, match="node 1 is lost: "):
        gather(port_of_lead, 2, 1, {}, {}, lambda: False, stages=2)


def test_a_machine_that_cannot_connect_to_another_once_the_lead_has_all_says_why(
    secret: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here one without an address for the machine after it."""
    folder = write_model(tmp_path / "m", seed=5, tokenizer=False, **VARIANTS["wide-heads"])
    gathered, of_others = threading.Event(), Node._arrival

    def gathering(*how: Any, **more: Any) -> nodes.Joined:
        joined = gather(*how, **more)
        gathered.set()
        return joined

    def arrival(node: Node, peer: str) -> tuple[socket.socket, dict[str, Any]]:
        gathered.wait(PATIENCE_S)
        return of_others(node, peer)

    monkeypatch.setattr(group, "gather", gathering)
    monkeypatch.setattr(Node, "_arrival", arrival)
    port = free_port()
    first = Node(folder, ("127.0.0.1", port), 1, SECRET, threads=1)

    def failing() -> str:
        try:
            first.run()
        except EngineError as error:
            return str(error)  # its connections end with the traceback, as they do with a process
        return ""

    def second() -> list[socket.socket]:
        traits = {**traits_of(folder), "clock": time.time()}
        hellos = [{"purpose": "node", "traits": traits}, {"purpose": "rank", "rank": 2}, {"purpose": "sums", "rank": 0}]
        connections = []
        for hello in hellos:
            connections.append(join(("127.0.0.1", port), SECRET, {"node": 2, **hello}, 60.0, "the lead"))
            if hello["purpose"] == "node":
                assert connections[0].recv(1 << 16)
        return connections

    with ThreadPoolExecutor(2) as pool:
        running, coming = pool.submit(failing), pool.submit(second)
        why = r"not served: rank 1 of 3 \(on node 1\): node 1 needs ranks_address, for the nodes after it"
        with pytest.raises(EngineError, match=why):
            Engine.load(folder, config(secret, port, nodes=3, tensor_parallel=3))
        assert running.result(timeout=PATIENCE_S) == "node 1 needs ranks_address, for the nodes after it"
        for connection in coming.result(timeout=PATIENCE_S):
            connection.close()


def test_the_same_traits_do_not_differ_nor_do_instruction_sets_where_no_native_kernels_compute(folder: Path) -> None:
    assert differing(traits_of(folder), traits_of(folder)) == ""
    other = {**traits_of(folder), "instruction set": "avx"}
    assert differing(traits_of(folder), other) != ""
    assert differing(traits_of(folder, native=False), other) == ""


def test_who_does_not_know_the_secret_is_turned_away_and_others_still_come(port_of_lead: Meeting) -> None:
    address = ("127.0.0.1", port_of_lead.port)
    with ThreadPoolExecutor(1) as pool:
        for stranger in (b"another secret of many", b""):
            tried = pool.submit(join, address, stranger, {"purpose": "node"}, 5.0, "the lead")
            while not tried.done():
                assert port_of_lead.next() is None
            with pytest.raises(EngineError, match=r"the lead at 127.0.0.1:\d+ turns this machine away"):
                tried.result()
        with socket.create_connection(address) as scanner:
            scanner.sendall(b"GET / HTTP/1.1\r\n\r\n" * 8)
            assert port_of_lead.next() is None
        pool.submit(join, address, SECRET, {"purpose": "node", "node": 1}, 5.0, "the lead")
        arrived = None
        while arrived is None:
            arrived = port_of_lead.next()
        assert arrived[1] == {"purpose": "node", "node": 1}


def test_strangers_who_say_nothing_keep_nobody_waiting(port_of_lead: Meeting, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meeting, "GREET_S", 60.0)
    monkeypatch.setattr(meeting, "_MAX_CALLERS", 2)
    address = ("127.0.0.1", port_of_lead.port)
    with ThreadPoolExecutor(1) as pool, ExitStack() as opened:
        silent = [opened.enter_context(socket.create_connection(address)) for _ in range(3)]
        coming = pool.submit(join, address, SECRET, {"purpose": "node"}, 60.0, "the lead")
        arrived = None
        while arrived is None and not coming.done():
            arrived = port_of_lead.next()
        opened.enter_context(coming.result())
        assert arrived is not None
        opened.enter_context(arrived[0])
        for _ in range(2):  # the first of them made room
            silent[0].settimeout(60)
            told = silent[0].recv(64)
        assert told == b""


def test_a_machine_whose_message_has_come_is_not_turned_away_by_a_lead_that_was_busy(
    port_of_lead: Meeting, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(meeting, "_LOOK_S", 0.0)
    said = b'{"purpose": "node"}'
    with socket.create_connection(("127.0.0.1", port_of_lead.port)) as end:
        assert until(lambda: port_of_lead.next() is None and port_of_lead._callers)
        nonce = end.recv(32)
        proof = meeting._proof(SECRET, b"node", nonce, bytes(32), said)
        end.sendall(bytes(32) + proof + len(said).to_bytes(4, "big") + said)
        port_of_lead._clock = lambda: time.monotonic() + 600
        arrived = port_of_lead.next()
        assert arrived is not None
        assert arrived[1] == {"purpose": "node"}
        arrived[0].close()


def test_a_machine_that_says_no_object_is_turned_away(port_of_lead: Meeting, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meeting, "_keep_alive", lambda connection, hello: connection.settimeout(None))
    messages: tuple[Any, ...] = ([1], "node", 7)
    with ThreadPoolExecutor(1) as pool:
        for message in messages:
            coming = pool.submit(join, ("127.0.0.1", port_of_lead.port), SECRET, message, 5.0, "the lead")
            while not coming.done():
                assert port_of_lead.next() is None
            assert coming.result().recv(1) == b""


def test_a_lead_that_is_busy_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meeting, "GREET_S", 0.05)
    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(1) as pool:
        coming = pool.submit(join, listener.getsockname(), SECRET, {}, 60.0, "the lead")
        end, _ = listener.accept()
        with end:
            for _ in range(4):
                assert not wait([coming], 0.1).done
            end.sendall(bytes(32))
            said = b""
            while len(said) < 70:
                said += end.recv(70)
            end.sendall(meeting._proof(SECRET, b"lead", said[:32], bytes(32), said[68:]))
            coming.result(timeout=PATIENCE_S).close()


def test_who_does_not_come_or_is_not_reached_is_named_in_bounded_time(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nodes, "JOIN_S", 0.0)
    port = free_port()
    with pytest.raises(EngineError, match=rf"node 1 and 2 of 3 has not come to port {port} in 0 s: .*firewall"):
        gather(Meeting(f"127.0.0.1:{port}", SECRET), 3, 1, {}, {}, lambda: False, stages=2)
    with pytest.raises(EngineError, match=r"the lead at 127.0.0.1:\d+ is not reached in 0 s .*firewall"):
        Node(folder, ("127.0.0.1", free_port()), 1, SECRET).run()


def drop_packets(end: socket.socket) -> None:
    """Drop all that comes to a socket from now on, as a firewall does: attaches a filter of one instruction, return 0
    (linux/filter.h)."""
    instruction = ctypes.create_string_buffer(struct.pack("HBBI", 0x06, 0, 0, 0))
    program = struct.pack("HxxxxxxP", 1, ctypes.addressof(instruction))
    end.setsockopt(socket.SOL_SOCKET, 26, program)  # SO_ATTACH_FILTER


def test_behind_a_firewall_that_drops_packets_both_sides_say_who_is_missing(
    port_of_lead: Meeting, monkeypatch: pytest.MonkeyPatch
) -> None:
    drop_packets(port_of_lead._listener)
    monkeypatch.setattr(nodes, "JOIN_S", 0.5)
    with ThreadPoolExecutor(1) as pool:
        coming = pool.submit(join, ("127.0.0.1", port_of_lead.port), SECRET, {}, 0.5, "the lead")
        with pytest.raises(EngineError, match=r"node 1 of 2 has not come to port \d+ in 0 s: .*firewall"):
            gather(port_of_lead, 2, 1, {}, {}, lambda: False, stages=2)
        with pytest.raises(
            EngineError, match=r"the lead at 127.0.0.1:\d+ is not reached in 0 s \(timed out\).*firewall"
        ):
            coming.result(timeout=PATIENCE_S)


@contextmanager
def connected(meeting: Meeting, purpose: str) -> Iterator[tuple[socket.socket, socket.socket]]:
    """Both ends of a connection to `meeting`."""
    with ThreadPoolExecutor(1) as pool:
        address = ("127.0.0.1", meeting.port)
        coming = pool.submit(join, address, SECRET, {"purpose": purpose}, 60.0, "the lead")
        arrived = None
        while arrived is None:
            arrived = meeting.next()
        with coming.result() as end, arrived[0] as other:
            yield end, other


@pytest.mark.parametrize(("purpose", "seconds"), [("node", 5), ("rank", 5), ("link", 15), ("sums", 15)])
def test_the_kernel_gives_up_a_connection_whose_other_machine_is_gone(
    purpose: str, seconds: int, port_of_lead: Meeting
) -> None:
    """Those with the lead first, which no end leaves unread."""
    with connected(port_of_lead, purpose) as ends:
        for end in ends:
            probes = [end.getsockopt(socket.IPPROTO_TCP, each) for each in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL)]
            assert sum(probes) < 5
            assert end.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
            assert end.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == seconds * 1000


@pytest.mark.exhaustive
@pytest.mark.parametrize("divided", ["tensor_parallel", "pipeline_parallel"])
def test_a_machine_that_is_gone_without_a_word_is_lost(divided: str, folder: Path, secret: str) -> None:
    port = free_port()
    part = Node(folder, ("127.0.0.1", port), 1, SECRET, threads=1)
    with ThreadPoolExecutor(1) as pool:
        running = started(pool, part)
        with Engine.load(folder, config(secret, port, nodes=2, **{divided: 2})) as engine:
            lost: queue.SimpleQueue[str] = queue.SimpleQueue()
            engine.on_lost = lambda why, suspects: lost.put(why)
            assert engine._group is not None
            joined = engine._group._joined
            sums = [end for ends in joined.sums.values() for end in ends.values()]
            for end in (*joined.nodes.values(), *joined.ranks.values(), joined.after, joined.back, *sums):
                if end is not None:
                    drop_packets(end)
            assert lost.get(timeout=PATIENCE_S).endswith("rank 1 of 2 (on node 1): its connection is lost")
        assert running.result(timeout=PATIENCE_S) is False


@pytest.mark.exhaustive
def test_a_link_whose_packets_are_dropped_is_lost_in_bounded_time(port_of_lead: Meeting) -> None:
    with connected(port_of_lead, "link") as (end, other):
        drop_packets(end)
        drop_packets(other)
        links = [SocketLink(end), SocketLink(other)]
        links[0].send(b"which is never acknowledged")
        for link in links:  # of one that sends, and one that waits
            with pytest.raises(DeviceLostError, match=r"the link to another machine is lost: .*timed out"):
                link.receive()


def test_a_machine_that_comes_but_not_its_ranks_is_named(
    port_of_lead: Meeting, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nodes, "CONNECT_S", -4.0)
    said = {"purpose": "node", "node": 1, "traits": {"clock": time.time()}}
    with ThreadPoolExecutor(1) as pool:
        coming = pool.submit(join, ("127.0.0.1", port_of_lead.port), SECRET, said, 5.0, "the lead")
        with pytest.raises(EngineError, match="rank 2, rank 3: not connected in 1 s though its machine has come"):
            gather(port_of_lead, 2, 2, {}, {}, lambda: False, stages=2)
        coming.result().close()


def test_a_link_carries_messages_and_is_lost_with_its_end() -> None:
    ends = socket.socketpair()
    one, other = map(SocketLink, ends)
    for message in (b"", b"abc", bytes(1 << 20)):
        sender = threading.Thread(target=one.send, args=(message,))
        sender.start()
        assert bytes(other.receive()) == message
        sender.join()
    ends[0].sendall((1 << 40).to_bytes(8, "little"))
    with pytest.raises(DeviceLostError, match="message of 1099511627776 bytes is announced; a step of this model has"):
        other.receive()
    with pytest.raises(DeviceLostError):
        one.send(bytes(1 << 20))
    assert other.failed


def test_a_link_is_read_while_its_end_computes() -> None:
    """Or its sender would be cut off once the connection takes no more, as if this end were gone."""
    one, other = map(SocketLink, socket.socketpair())
    messages = [bytes([i]) * (8 << 20) for i in range(3)]

    def send() -> None:
        for message in messages:
            one.send(message)

    sender = threading.Thread(target=send, daemon=True)
    sender.start()
    received = [bytes(other.receive())]
    sender.join(PATIENCE_S)
    assert not sender.is_alive()
    assert received + [bytes(other.receive()) for _ in messages[1:]] == messages
    one.fail()
    for _ in range(2):
        with pytest.raises(DeviceLostError, match="it is closed"):
            other.receive()


def test_settings_of_several_machines_are_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match=r"nodes=2 needs ranks_secret"):
        EngineConfig(pipeline_parallel=2, nodes=2)
    with pytest.raises(
        EngineError, match=r"pipeline_parallel=3 with tensor_parallel=1 cannot be divided among nodes=2"
    ):
        EngineConfig(pipeline_parallel=3, nodes=2, ranks_secret="s")
    EngineConfig(tensor_parallel=2, pipeline_parallel=2, nodes=4, ranks_secret="s")
    with pytest.raises(EngineError, match=r"cannot be divided among nodes=4"):
        EngineConfig(tensor_parallel=3, pipeline_parallel=2, nodes=4, ranks_secret="s")
    with pytest.raises(EngineError, match=r"tensor_parallel=4 by pipeline_parallel=8 is more than the 16"):
        EngineConfig(tensor_parallel=4, pipeline_parallel=8)
    (tmp_path / "short").write_bytes(b"short")
    with pytest.raises(EngineError, match=r"ranks_secret: .* has 5 bytes; 16 is the least"):
        read_secret(str(tmp_path / "short"))
    with pytest.raises(EngineError, match=r"ranks_secret: .*No such file"):
        read_secret(str(tmp_path / "none"))
    for address in ("10.0.0.5", "10.0.0.5:0", "10.0.0.5:99999", ":1"):
        with pytest.raises(EngineError, match=r"ranks_address is .*; it must be HOST:PORT"):
            Meeting(address, SECRET)
