"""Ranks that sum by torch.distributed say what one device says: here on CPUs, by gloo, with plain torch's kernels."""

from __future__ import annotations

import gc
import os
import queue
import random
import signal
import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from engine import Engine, EngineConfig
from engine.adapters import Adapter, load_adapter
from engine.errors import DeviceLostError, EngineError
from engine.execution import placement
from engine.execution.placement import device_runner_of, plan_capacity
from engine.execution.ranks.device import DeviceLead, backend_of, follow_on_device
from engine.execution.ranks.nodes import Node
from engine.execution.ranks.runner import types_of
from engine.kernels.collectives import Collectives, Communicators, RanksStore
from engine.kernels.native import load_library
from engine.kernels.native.exchange import Share
from engine.memory import block_bytes
from engine.models import load_model
from engine.params import SamplingParams
from engine.speculate import Lookup, Speculation
from tests.engine.adapters.test_native import adapter_of
from tests.engine.execution.ranks.in_threads import exchanges_of
from tests.engine.execution.ranks.test_parity import SHAPES, run
from tests.engine.random_models import VARIANTS, write_model
from tests.exhaustive import few
from tests.parity.driver import Driver, greedy, prompts_of, recorded
from tests.waiting import PATIENCE_S

pytestmark = pytest.mark.skipif(load_library() is None, reason="native kernels are not built for this CPU")

CPU = torch.device("cpu")
TINY = Path(__file__).parents[4] / "workers" / "models" / "tiny"


class Ranks(NamedTuple):
    lead: DeviceLead
    adapters: list[dict[int, Adapter]]


@contextmanager
def ranks_of(
    folder: Path,
    ranks: int,
    dtype: str = "float32",
    *,
    stages: int = 1,
    ordered: bool = False,
    adapters: Sequence[Path] = (),
) -> Iterator[Ranks]:
    """The lead of `stages` stages of ranks that are threads of this process, and each rank's `adapters` by number."""
    store = RanksStore()
    exchanges = exchanges_of(ranks * stages)
    every = [Communicators(rank, ranks, stages, "gloo", ordered=ordered) for rank in range(ranks * stages)]
    shares = [load_model(folder, dtype, CPU, "ragged", exchange=each.sums, stage=each.stage) for each in every]
    loaded = [{number: load_adapter(each, share) for number, each in enumerate(adapters)} for share in shares]

    def follow(rank: int) -> None:
        try:
            every[rank].connect(store, CPU)
            follow_on_device(shares[rank], exchanges[rank], every[rank], loaded[rank])
        except DeviceLostError:
            return
        except BaseException:
            exchanges[rank].fail()
            raise

    threads = [threading.Thread(target=follow, args=(rank,), daemon=True) for rank in range(1, len(every))]
    for thread in threads:
        thread.start()
    every[0].connect(store, CPU)
    lead = DeviceLead(shares[0], exchanges[0], every[0])
    for number in loaded[0]:
        lead.number(loaded[0][number], number)
    try:
        yield Ranks(lead, loaded)
    finally:
        lead.fail()
        for thread in threads:
            thread.join()


def driver(lead: DeviceLead, **settings: Any) -> Driver:
    """A Driver of all ranks. It has as many steps in flight as stages, but two of a single stage."""
    stages = lead.communicators.stage.ranks
    settings |= {"overlap": stages - 1, "batches": stages} if stages > 1 else {"overlap": 1}
    return Driver(lead, device_runner=device_runner_of(lead), **settings)


CASES = [(name, ranks) for name in SHAPES for ranks in (2, 3, 4) if (ranks == 3) == (name == "wide-heads")]


@pytest.mark.parametrize(("name", "ranks"), few(CASES, ("biases", 2), ("qwen3-moe", 2)))
def test_ranks_on_devices_compute_what_one_computes(name: str, ranks: int, tmp_path: Path) -> None:
    folder = write_model(tmp_path / name, seed=5, tokenizer=False, **SHAPES[name])
    prompts = prompts_of([1, 17, 58], 320)
    alone = load_model(folder, "float32", CPU, "ragged")
    logits = recorded(alone)
    expected = run(Driver(alone, tokens=40, overlap=1), prompts)
    with ranks_of(folder, ranks) as (lead, _):
        seen = recorded(lead)
        assert run(driver(lead, tokens=40), prompts) == expected
    assert len(seen) == len(logits)
    for ours, theirs in zip(seen, logits, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=2e-4)


def test_the_cache_is_sized_by_the_rank_with_the_least_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_model(tmp_path / "m", seed=5, tokenizer=False, **VARIANTS["gqa"])
    sizes, given = iter((8 << 20, 5 << 20, 6 << 20, 7 << 20)), list[Any]()

    def free(*how: Any) -> int:
        given.append(how)
        return next(sizes)

    monkeypatch.setattr("engine.execution.ranks.runner.free_bytes", free)
    settings: dict[str, Any] = {"tensor_parallel": 4, "max_num_seqs": 512}
    with ranks_of(folder, 4) as (lead, _):
        spaces = plan_capacity(lead, EngineConfig(**settings, memory_share=0.5, share=0.25)).spaces
        assert spaces == plan_capacity(lead, EngineConfig(**settings, kv_cache_bytes=5 << 20)).spaces
    assert given == [(CPU, 0.5, 0, 0.25)] * 4


@pytest.mark.parametrize(
    ("name", "changes", "least"),
    [
        ("gqa", {}, 0.95),
        # The layers that see everything, of which there are far more blocks, are in the second stage.
        ("gemma3", {"layer_types": ["sliding_attention"] * 3 + ["full_attention"] * 2}, 0.6),
    ],
)
def test_each_stage_has_memory_for_its_layers(
    name: str, changes: dict[str, Any], least: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape = SHAPES[name] | {"num_hidden_layers": 5} | changes
    folder = write_model(tmp_path / "m", seed=5, tokenizer=False, **shape)
    free = 1 << 20
    monkeypatch.setattr(placement, "_free", lambda *how: free)
    with ranks_of(folder, 1, stages=2) as (lead, _):
        lead.device = torch.device("cuda")
        spaces = plan_capacity(lead, EngineConfig(pipeline_parallel=2, max_num_seqs=512)).spaces
        groups = [lead.share.groups_of(Share(stage, 2)) for stage in range(2)]
    taken = [
        sum(space.num_blocks * block_bytes(group, 16, 4) for space, group in zip(spaces, of_stage, strict=True))
        for of_stage in groups
    ]
    assert least * free < max(taken) <= free


DRAWN = SamplingParams(max_tokens=7, temperature=0.9, seed=4, logprobs=1, prompt_logprobs=1, n=2, ignore_eos=True)


@pytest.mark.parametrize(("ranks", "stages"), [(2, 1), (1, 2)])
def test_preempted_drawn_guessed_and_adapted_tokens_are_those_of_one_device(
    ranks: int, stages: int, tmp_path: Path
) -> None:
    folder = write_model(tmp_path / "m", seed=2, tokenizer=False, **VARIANTS["gqa"])

    def answers(model: Any, make: Any, adapters: list[Adapter | None]) -> tuple[Any, list[float]]:
        guesses = Speculation(Lookup(8, model.vocab_size), max_tokens=3, adaptive=False)
        stepped = make(model, tokens=24, speculation=guesses)
        for i, prompt in enumerate([[5, 6, 7, 8] * 8, *prompts_of([3, 20, 5], 320)]):
            stepped.add(str(i), prompt, DRAWN if i == 2 else greedy(9), adapters[i])
        stepped.run(preempt_every=7)
        scores: dict[Any, list[float]] = {}
        for event in stepped.events:
            told = [entry.logprob for entry in [*(event.logprobs or []), *(event.prompt_logprobs or [])] if entry]
            scores.setdefault((event.request_id, event.choice), []).extend(told)
        return stepped.found, [score for key in sorted(scores) for score in scores[key]]

    alone = load_model(folder, "float32", CPU, "ragged")
    own = [adapter_of(alone, tmp_path / str(i), rank=2 + 3 * i, seed=i, every=1 + i) for i in range(2)]
    tokens, scores = answers(alone, partial(Driver, overlap=1), [own[0], None, own[1], own[1]])
    with ranks_of(folder, ranks, stages=stages, adapters=[tmp_path / "0", tmp_path / "1"]) as (lead, adapters):
        first, second = adapters[0].pop(0), adapters[0].pop(1)
        found, seen = answers(lead, driver, [first, None, second, second])
        del first, second
        gc.collect()  # the first runner and its recordings, which know each other
        assert adapters[1].keys() == {0, 1}
        answers(lead, driver, [None] * 4)
        assert [each for each in adapters if each] == []  # the followers forget those that are gone here
    assert found == tokens
    assert seen == pytest.approx(scores, abs=1e-4)


#: What only the host can follow, guessed text, and several outputs of one request.
REQUESTS: dict[str, SamplingParams] = {
    "x = [1, 2, 3, 1, 2, 3, 1,": SamplingParams(max_tokens=16, temperature=0.0, logprobs=3, prompt_logprobs=2),
    "a b c d e f a b c": SamplingParams(
        max_tokens=40,
        temperature=0.0,
        json_schema='{"type": "object", "properties": {"name": {"type": "string", "maxLength": 12}, '
        '"n": {"type": "integer"}}, "required": ["name", "n"]}',
    ),
    "answer: no, never. answer: no,": SamplingParams(
        max_tokens=20, temperature=0.8, seed=9, regex=r"(yes|no), [a-z]{3,8}\.", logprobs=1
    ),
    "import os\nimport sys\n": SamplingParams(max_tokens=12, temperature=0.0, bad_words=("import os", "import sys")),
    "a b c d a b": SamplingParams(max_tokens=8, temperature=0.9, seed=7, n=2, choice=("a b c", "c d", "d a b")),
    "class A:": SamplingParams(max_tokens=8, temperature=0.0, beam_width=3, n=2),
}


@pytest.mark.parametrize(("ranks", "stages"), few([(2, 1), (1, 2), (2, 2)], (1, 2)))
def test_forms_guesses_scores_and_beams_are_those_of_one_device(ranks: int, stages: int) -> None:
    settings: dict[str, Any] = {"kernels": "ragged", "dtype": "float32", "kv_cache_bytes": 4 << 20, "threads": 1}
    guesses: dict[str, Any] = {"speculate": "lookup", "speculate_adaptive": False}

    def answers(model: Any, **more: Any) -> tuple[list[Any], list[float]]:
        config = EngineConfig(**settings, **more, max_num_seqs=8)
        with Engine(model, config, folder=TINY, version="") as engine:
            outputs = engine.generate(list(REQUESTS), list(REQUESTS.values()))
            assert bool(engine.stats().draft_accepted) == ("speculate" in more)
        scores = [
            entry.logprob
            for output in outputs
            for entry in [*(output.prompt_logprobs or []), *(output.logprobs or [])]
            if entry is not None
        ]
        return [(out.error, [(each.token_ids, each.finish_reason) for each in out.choices]) for out in outputs], scores

    expected, scores = answers(load_model(TINY, "float32", CPU, "ragged"))
    assert not any(error for error, _ in expected)
    with ranks_of(TINY, ranks, stages=stages) as (lead, _):
        found, seen = answers(lead, **guesses, tensor_parallel=ranks, pipeline_parallel=stages)
    assert found == expected
    assert seen == pytest.approx(scores, abs=1e-3)


#: Model, ranks of a stage, stages.
GRIDS = [
    (name, 3 if name == "wide-heads" and ranks == 2 else ranks, stages)
    for name in SHAPES
    for ranks, stages in ((1, 2), (2, 2), (1, 3))
    if SHAPES[name].get("num_hidden_layers", 2) >= stages
]


@pytest.mark.parametrize(("name", "ranks", "stages"), few(GRIDS, ("biases", 2, 2)))
def test_stages_on_devices_compute_what_one_device_computes(name: str, ranks: int, stages: int, tmp_path: Path) -> None:
    folder = write_model(tmp_path / name, seed=5, tokenizer=False, **SHAPES[name])
    prompts = prompts_of([1, 17, 58], 320)
    expected = run(Driver(load_model(folder, "float32", CPU, "ragged"), tokens=40, overlap=1), prompts)
    with ranks_of(folder, ranks, stages=stages) as (lead, _):
        assert run(driver(lead, tokens=40), prompts) == expected


@pytest.mark.exhaustive
def test_slots_that_pass_on_while_a_step_is_in_flight_lose_no_token(tmp_path: Path) -> None:
    """Sampled when it is collected, a step's sequence may have lost its slot to another, with other penalties."""
    folder = write_model(tmp_path / "m", seed=5, tokenizer=False, **SHAPES["gemma3"])
    drawn = random.Random(3)
    requests = []
    for i, prompt in enumerate(prompts_of([drawn.randrange(1, 50) for _ in range(14)], 320)):
        params = SamplingParams(
            max_tokens=drawn.randrange(1, 12),
            temperature=drawn.choice([0.0, 0.9]),
            seed=i,
            repetition_penalty=drawn.choice([1.0, 1.5]),
            presence_penalty=drawn.choice([0.0, 0.7]),
            prompt_logprobs=drawn.choice([None, 1]),
            ignore_eos=True,
        )
        requests.append((prompt, params))

    def answers(stepped: Driver) -> Any:
        for i, (prompt, params) in enumerate(requests):
            stepped.add(str(i), prompt, params)
        stepped.add("beams", [5, 6, 7], SamplingParams(max_tokens=5, beam_width=2, temperature=0.0))
        stepped.run(preempt_every=3)
        return stepped.found

    few_places: dict[str, Any] = {"tokens": 30, "sequences": 4, "blocks": 24}
    expected = answers(Driver(load_model(folder, "float32", CPU, "ragged"), overlap=1, **few_places))
    for stages in (2, 3):
        with ranks_of(folder, 1, stages=stages) as (lead, _):
            assert answers(driver(lead, **few_places)) == expected


@pytest.mark.exhaustive
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(("ranks", "stages"), [(2, 1), (1, 2)])
def test_ranks_on_devices_have_the_data_types_of_one(dtype: str, ranks: int, stages: int, tmp_path: Path) -> None:
    folder = write_model(tmp_path / "m", seed=5, tokenizer=False, **SHAPES["gqa"])
    prompts = prompts_of([1, 17, 58], 320)
    alone = load_model(folder, dtype, CPU, "ragged")
    logits = recorded(alone)
    expected = run(Driver(alone, tokens=40, overlap=1), prompts)
    with ranks_of(folder, ranks, dtype, stages=stages) as (lead, _):
        assert (lead.dtype, lead.kernels.compute_dtype) == (alone.dtype, alone.kernels.compute_dtype)
        if stages > 1:  # of which no sum is in another order
            assert run(driver(lead, tokens=40), prompts) == expected
            return
        seen = recorded(lead)
        run(driver(lead, tokens=40), prompts)
    torch.testing.assert_close(seen[0], logits[0], rtol=0, atol=0.1)


def test_ordered_sums_are_the_same_beside_any_rows() -> None:
    """In bf16, three parts whose sum depends on their order."""
    parts = [torch.randn(64, generator=torch.Generator().manual_seed(rank)).bfloat16() for rank in range(3)]
    sums, store = dict[int, torch.Tensor](), RanksStore()

    def add(rank: int) -> None:
        end = Collectives(Share(rank, 3), "gloo", ordered=True)
        end.connect(store, CPU)
        sums[rank] = end.sum(parts[rank].clone())

    threads = [threading.Thread(target=add, args=(rank,)) for rank in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    expected = ((parts[0].float() + parts[1].float()) + parts[2].float()).bfloat16()
    assert all(torch.equal(each, expected) for each in sums.values())


#: Settings of the engine whose ranks are processes, and the devices that they need.
DEVICES: dict[str, tuple[dict[str, Any], int]] = {
    "cpu": ({"device": "cpu", "kernels": "ragged", "tensor_parallel": 2}, 0),
    "cpu, stages": ({"device": "cpu", "kernels": "ragged", "pipeline_parallel": 2}, 0),
    # In Triton's interpreter, with adapters in recorded steps.
    "cpu, interpreted": ({"device": "cpu", "kernels": "triton", "tensor_parallel": 2, "kv_cache_dtype": "int8"}, 0),
    "cpu, 2 by 2": ({"device": "cpu", "kernels": "ragged", "tensor_parallel": 2, "pipeline_parallel": 2}, 0),
    "cuda, shared": ({"tensor_parallel": 4, "graphs": False}, 1),
    "cuda, shared stages": ({"tensor_parallel": 2, "pipeline_parallel": 2, "graphs": False}, 1),
    "cuda, 2": ({"tensor_parallel": 2}, 2),
    "cuda, 2, deterministic": ({"tensor_parallel": 2, "deterministic": True}, 2),
    "cuda, stages": ({"pipeline_parallel": 2}, 2),
    "cuda, 2 by 2": ({"tensor_parallel": 2, "pipeline_parallel": 2}, 4),
    "cuda, 4": ({"tensor_parallel": 4}, 4),
    "cuda, 8": ({"tensor_parallel": 8}, 8),
}


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("family", "where"),
    [*(("gqa", where) for where in DEVICES), ("gemma3", "cuda, 2"), ("qwen3-moe", "cuda, 2")],
)
def test_processes_compute_what_one_computes_until_one_is_killed(family: str, where: str, tmp_path: Path) -> None:
    """On GPUs, those that share one sum by gloo, others by NCCL in recorded steps: a recording that fails is an
    error."""
    more, gpus = DEVICES[where]
    if gpus > (torch.cuda.device_count() if torch.cuda.is_available() else 0):
        pytest.skip(f"there are fewer than {gpus} GPUs, of CUDA")
    ranks = more.get("tensor_parallel", 1) * more.get("pipeline_parallel", 1)
    if gpus == 1 and torch.cuda.device_count() >= ranks:
        pytest.skip("each rank has a GPU of its own, by CUDA")
    shape = SHAPES[family] | {"num_attention_heads": 8} if gpus == 8 else SHAPES[family]
    folder = write_model(tmp_path / "m", seed=2, tokenizer=False, **shape)
    settings: dict[str, Any] = {"dtype": "float32", "kv_cache_bytes": 1 << 22, "seed": 3} | more
    adapter_of(load_model(folder, "float32", CPU, "ragged"), tmp_path / "a", rank=2, seed=1)

    def answers(engine: Engine) -> list[list[int]]:
        prompts = prompts_of([1, 17, 58], 320)
        outputs = [*engine.generate(list(prompts), greedy(9)), *engine.generate(list(prompts), greedy(9), "a")]
        return [output.token_ids for output in outputs]

    with Engine.load(folder, EngineConfig(**(settings | {"tensor_parallel": 1, "pipeline_parallel": 1}))) as engine:
        engine.load_adapter("a", tmp_path / "a")
        expected = answers(engine)
        alone = engine.fingerprint
    with Engine.load(folder, EngineConfig(**settings)) as engine:
        assert (engine.fingerprint == alone) == (more.get("tensor_parallel", 1) == 1)
        for process in (os.getpid(), *engine.stats().rank_processes):
            assert listened_at(process) <= {"0100007F"}
        adapter = engine.load_adapter("a", tmp_path / "a")
        assert answers(engine) == expected
        adapter_of(load_model(folder, "float32", CPU, "ragged"), tmp_path / "a", rank=2, seed=9)
        with pytest.raises(EngineError, match=f"rank 1: .* its files are version .*, and the lead's {adapter.version}"):
            engine._group.load_adapter(tmp_path / "a", adapter.version, 1000)
        lost: queue.SimpleQueue[str] = queue.SimpleQueue()
        engine.on_lost = lambda why, suspects: lost.put(why)
        process = engine.stats().rank_processes[0]
        os.kill(process, signal.SIGKILL)
        assert f"rank 1 of {ranks} (process {process}): it was killed by SIGKILL" in lost.get(timeout=PATIENCE_S)


def test_ranks_on_gpus_of_other_kinds_differ(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    share = load_model(write_model(tmp_path / "m", tokenizer=False, **VARIANTS["gqa"]), "float32", CPU, "ragged")
    monkeypatch.setattr(share, "device", torch.device("cuda", 1))
    monkeypatch.setattr(torch.cuda, "get_device_capability", {torch.device("cuda", 1): (9, 0)}.__getitem__)
    assert types_of(share).endswith(" for sm_90")


def listened_at(process: int) -> set[str]:
    """The addresses at which a process listens, as the kernel writes them."""
    own = set[str]()
    for each in Path(f"/proc/{process}/fd").iterdir():
        with suppress(FileNotFoundError):  # it was closed meanwhile
            own.add(os.readlink(each))
    sockets = [
        line.split()
        for table in ("tcp", "tcp6")
        for line in Path(f"/proc/{process}/net/{table}").read_text(encoding="ascii").splitlines()[1:]
    ]
    return {each[1].partition(":")[0] for each in sockets if each[3] == "0A" and f"socket:[{each[9]}]" in own}


def test_what_ranks_on_gpus_need_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = torch.device("cuda")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(EngineError, match=r"tensor_parallel=2 and pipeline_parallel=1 on GPUs need kernels='triton'"):
        backend_of(EngineConfig(tensor_parallel=2, kernels="sdpa"), cuda)
    with pytest.raises(EngineError, match=r"by pipeline_parallel=2 needs 4 GPUs on this machine, and this proc"):
        backend_of(EngineConfig(tensor_parallel=2, pipeline_parallel=2, kernels="triton"), cuda)
    assert backend_of(EngineConfig(tensor_parallel=2, kernels="triton", graphs=False), cuda) == "gloo"
    assert backend_of(EngineConfig(kernels="triton"), cuda) is None
    part = {"ranks": 4, "stages": 1, "nodes": 2, "device": "cuda", "backend": "nccl"}
    node = Node(Path("m"), ("127.0.0.1", 1), 1, b"")
    with (
        socket.socket() as node._control,
        pytest.raises(EngineError, match="node 1 has 1 GPUs, and 2 ranks of the model"),
    ):
        node._start(part)
    assert backend_of(EngineConfig(tensor_parallel=2), CPU) is None
