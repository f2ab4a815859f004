"""Which steps share a recording; and, on a GPU, that what is replayed is what would have been launched."""

from __future__ import annotations

import itertools
import logging
import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from engine import Engine, EngineConfig, SamplingParams
from engine.execution.device.graphs import DecodeGraphs, Recorded, Recording, batch_sizes, recorder
from engine.execution.device.inputs import Shape

CPU = torch.device("cpu")


def graphs(slots: int = 64, most_places: int = 8192) -> DecodeGraphs:
    return DecodeGraphs(Recorded, slots=slots, most_places=most_places, device=CPU)


def decode(rows: int, *places: int) -> Shape:
    return Shape(rows, rows, 1, places or (100,))


@pytest.mark.parametrize("most", [1, 2, 3, 7, 64, 100, 256, 300, 512, 1000, 4096])
def test_sizes_end_with_the_most_and_pad_by_seven_rows_or_a_quarter(most: int) -> None:
    sizes = batch_sizes(most)
    assert sizes[-1] == most
    assert sizes == sorted(set(sizes))
    assert all(after - before - 1 <= max(7, before // 4) for before, after in itertools.pairwise(sizes))
    assert len(sizes) <= 90


def test_steps_are_padded_to_the_next_size_and_bound() -> None:
    found = graphs(slots=20, most_places=50_000)
    assert found.padded(decode(3, 700, 20)) == decode(4, 1024, 1024)
    assert found.padded(decode(9, 1025, 1024)) == decode(16, 4096, 1024)
    assert found.padded(decode(17, 17_000)) == decode(20, 50_000)
    # A table behind a window may hold more than the longest sequence has room for in one that is not.
    assert graphs(most_places=64).padded(decode(1, 80)) == decode(1, 80)
    assert found.padded(Shape(3, 9, 5, (100,))) is None


def test_any_step_fits_its_recording() -> None:
    dice = random.Random(0)
    for _ in range(300):
        slots, longest = dice.randint(1, 600), dice.randint(1, 1 << 17)
        rows, places = dice.randint(1, slots), dice.randint(1, longest)
        padded = graphs(slots, longest).padded(decode(rows, places))
        assert padded is not None
        assert rows <= padded.rows <= slots
        assert places <= padded.most_places[0] <= max(longest, 4 * places)


def test_what_is_recorded_is_replayed_until_the_memory_is_another() -> None:
    recorded: list[Shape] = []
    replayed: list[Shape] = []

    def record(run: Callable[[], None]) -> Recording:
        run()
        return Recorded(lambda: replayed.append(recorded[-1]))

    found = DecodeGraphs(record, slots=8, most_places=64, device=CPU)
    for version, rows in ((0, 1), (0, 1), (0, 2), (1, 1), (1, 1)):
        found.run(decode(rows), version, recorded.append)
    assert recorded == [decode(1), decode(2), decode(1)]
    assert len(found) == 1


def test_sizes_for_which_there_is_no_memory_run_without_and_others_are_still_recorded() -> None:
    ran: list[Shape] = []

    def record(run: Callable[[], None]) -> Recording:
        before = len(ran)
        run()
        if ran[before].rows > 4:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return Recorded(lambda: None)

    found = DecodeGraphs(record, slots=16, most_places=128, device=CPU)
    for rows in (8, 2):
        padded = found.padded(decode(rows))
        assert padded is not None
        found.run(padded, 0, ran.append)
    assert found.padded(decode(8)) is None
    assert found.padded(decode(2)) == decode(2, 128)
    assert len(found) == 1
    # At once, as it is.
    assert [shape.rows for shape in ran] == [8, 8, 2]


@pytest.mark.cuda
def test_on_a_gpu_a_recording_that_fails_harms_no_memory_and_no_other() -> None:
    cuda = torch.device("cuda")
    numbers = torch.zeros(8, device=cuda)
    seen: list[float] = []

    def asking(shape: Shape) -> None:
        numbers.add_(1)
        seen.extend((numbers * 2).tolist())

    def filling(shape: Shape) -> None:
        numbers.fill_(5)

    found = DecodeGraphs(recorder(cuda), slots=4, most_places=64, device=cuda)
    found.run(decode(1), 0, asking)
    assert found.padded(decode(1)) is None
    assert seen[-1] == 2 * int(numbers[0])
    assert torch.cuda.current_stream() == torch.cuda.default_stream()
    torch.cuda.empty_cache()
    other = DecodeGraphs(recorder(cuda), slots=4, most_places=64, device=cuda)
    other.run(decode(1), 0, filling)
    numbers.zero_()
    other.run(decode(1), 0, lambda shape: None)
    assert len(other) == 1
    assert numbers.tolist() == [5.0] * 8


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_on_a_gpu_replayed_steps_say_what_launched_ones_say(
    model_folder: Path, dtype: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Of the same sizes: with a graph a step is padded, which may change the order of sums."""
    params = [
        SamplingParams(max_tokens=30, temperature=0.0, ignore_eos=True, logprobs=2),
        SamplingParams(max_tokens=30, seed=3, temperature=0.9, top_p=0.9, ignore_eos=True),
        SamplingParams(max_tokens=25, seed=4, temperature=1.0, repetition_penalty=1.2, ignore_eos=True),
    ]
    prompts = [[5, 9, 200, 31], [7] * 40, list(range(100))]
    found = []
    with caplog.at_level(logging.INFO, "penstock.engine"):
        for recorded in (True, False):
            for overlap in (0, 1):
                config = EngineConfig(
                    device="cuda", dtype=dtype, max_num_seqs=4, kv_cache_bytes=4 << 20, graphs=recorded, overlap=overlap
                )
                with Engine.load(model_folder, config) as engine:
                    # One at a time, then together.
                    alone = [engine.generate([prompt], one)[0] for prompt, one in zip(prompts, params, strict=True)]
                    # Who runs beside whom is a matter of time, and may change the order of sums.
                    together = engine.generate(prompts, params) if dtype == "float32" else []
                    found.append([one.token_ids for one in alone + together])
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert any("recorded decode steps of 1 sequences" in record.message for record in caplog.records)
    if dtype == "float32":
        assert found == [found[0]] * 4
    else:
        # Ahead or not is the same to the bit, replayed and launched.
        assert found[0] == found[1]
        assert found[2] == found[3]
