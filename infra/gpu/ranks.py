"""Measures a model that several GPUs compute together, by their number.

python infra/gpu/ranks.py OUT.json

Each shape is written to disk with few of its layers, twice, with random weights, and served by 1, 2, 4 and 8 ranks, as
many as there are GPUs, also in two stages. What a layer takes is the difference of the two over that of their layers,
and a step of the whole shape is estimated from it. On a single GPU two ranks share it, with sums through the host, to
see that they work. Sums of a few rows are then measured alone (sums.py). With `--tiny` ranks are processes on the CPU,
with a tiny model, to test this file.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np
import torch

from engine import Engine, EngineConfig
from engine.bench.offline import Job, run_jobs
from engine.kernels import select
from engine.models.decoder import Decoder
from engine.models.families import FAMILIES
from engine.text.config import Config
from infra.gpu import sums
from infra.gpu.shapes import SHAPES
from infra.gpu.steps import Steps

#: Shapes with the two numbers of layers that are measured.
MEASURED: Final = {"llama-8b": (2, 8), "llama-70b": (2, 6)}
#: The most ranks, and sequences of a step.
RANKS, BATCHES = (1, 2, 4, 8), (1, 16, 64)
#: Random numbers that are repeated, and the standard deviation of weights.
_DRAWN, _SPREAD = 1 << 24, 0.02


def write_random(folder: Path, shape: str, layers: int) -> Path:
    """Write a checkpoint of the shape with so many layers, in bf16, and return its folder."""
    settings = SHAPES[shape] | {"num_hidden_layers": layers}
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(settings))
    kernels = select(torch.device("cpu"), torch.bfloat16, "reference")
    model = Decoder(
        FAMILIES["LlamaForCausalLM"], Config.of_model(settings), kernels, torch.bfloat16, torch.device("meta")
    )
    places = {name: tuple(place.shape) for name, place in model.weights().items()}
    drawn = np.random.default_rng(7).standard_normal(_DRAWN, np.float32) * _SPREAD
    halves = (drawn.view(np.uint32) >> 16).astype(np.uint16)  # bf16, cut
    head, end = {}, 0
    for name, size in places.items():
        head[name] = {"dtype": "BF16", "shape": size, "data_offsets": [end, end := end + 2 * int(np.prod(size))]}
    header = json.dumps(head).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        for name, size in places.items():
            left = int(np.prod(size))
            if "norm" in name:
                file.write(np.full(left, 0x3F80, np.uint16).tobytes())  # ones
                continue
            while left:
                file.write(halves[:left].data)
                left -= min(left, _DRAWN)
    return folder


def configs(gpus: int, heads: int) -> Iterator[tuple[str, EngineConfig]]:
    """The engines to measure, by name. `gpus`: 0 is a CPU."""
    common: dict[str, Any] = {"enable_prefix_caching": False, "max_num_seqs": 64, "seed": 1}
    if not gpus:
        for ranks, stages in ((1, 1), (2, 1), (1, 2), (2, 2)):
            grid: dict[str, Any] = {"tensor_parallel": ranks, "pipeline_parallel": stages}
            yield (
                f"{ranks} by {stages} ranks, CPU",
                EngineConfig(**common, **grid, kernels="ragged", kv_cache_bytes=1 << 24),
            )
        return
    for ranks in (count for count in RANKS if count <= gpus and heads % count == 0):
        yield f"{ranks} of {gpus} GPUs", EngineConfig(**common, tensor_parallel=ranks, max_model_len=2304)
        if 2 * ranks <= gpus:
            grid = {"tensor_parallel": ranks, "pipeline_parallel": 2}
            yield f"{ranks} by 2 of {gpus} GPUs", EngineConfig(**common, **grid, max_model_len=2304)
    if gpus == 1:
        settings = common | {"graphs": False, "kv_cache_bytes": 8 << 30, "max_model_len": 2304}
        yield "2 ranks on one GPU", EngineConfig(**settings, tensor_parallel=2)


def measured(folder: Path, config: EngineConfig, *, tiny: bool) -> dict[str, float]:
    """Milliseconds of a decode step by batch, and the prompt tokens a second."""
    ids = random.Random(1234)  # noqa: S311  # data, not secrets
    vocabulary = json.loads((folder / "config.json").read_text())["vocab_size"]
    context, output = (16, 8) if tiny else (1024, 96)

    def jobs(count: int, length: int, tokens: int) -> list[Job]:
        return [([ids.randrange(2, vocabulary) for _ in range(length)], tokens) for _ in range(count)]

    figures: dict[str, float] = {}
    with Engine.load(folder, config) as engine:
        for batch in (2,) if tiny else BATCHES:
            run_jobs(engine, jobs(batch, context, 8))
            steps = Steps(engine, batch, output, config.pipeline_parallel)
            steps.run(jobs(batch, context, output))
            figures[f"decode {batch}"] = statistics.median(steps.whole()[0]) * 1e3
        count = 2 if tiny else 16
        wall = min(run_jobs(engine, jobs(count, context, 1))["wall_s"] for _ in range(2))
        figures["prefill of 1,000 tokens"] = wall * 1e6 / (count * context)
    return figures


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--tiny", action="store_true")
    args = parser.parse_args()
    gpus = 0 if args.tiny else torch.cuda.device_count()
    found: dict[str, Any] = {"gpus": [torch.cuda.get_device_name(i) for i in range(gpus)], "shapes": {}}
    failed = False
    for shape, layers in {"tiny": (2, 4)}.items() if args.tiny else MEASURED.items():
        figures = found["shapes"][shape] = {}
        with tempfile.TemporaryDirectory() as temporary:
            few, more = (write_random(Path(temporary) / str(count), shape, count) for count in layers)
            for name, config in configs(gpus, SHAPES[shape]["num_attention_heads"]):
                try:
                    first, second = (measured(folder, config, tiny=args.tiny) for folder in (few, more))
                    whole, (least, most) = SHAPES[shape]["num_hidden_layers"], layers
                    figures[name] = {
                        what: {
                            f"{most} layers, ms": second[what],
                            f"of all {whole}, ms, estimated": first[what]
                            + (second[what] - first[what]) / (most - least) * (whole - least),
                        }
                        for what in first
                    }
                except Exception as error:  # noqa: BLE001  # the other figures must not be lost
                    failed, figures[name] = True, {"error": f"{type(error).__name__}: {error}"}
                print(shape, name, json.dumps(figures[name]), flush=True)
                args.out.write_text(json.dumps(found, indent=1) + "\n")
    of_sums: dict[str, dict[str, Any]] = {}
    found["sums"] = of_sums
    for ranks in (2,) if args.tiny else [count for count in RANKS if 1 < count <= gpus]:
        try:
            of_sums[f"{ranks} ranks"] = sums.measured(ranks, gpus=not args.tiny)
        except Exception as error:  # noqa: BLE001  # the other figures must not be lost
            failed, of_sums[f"{ranks} ranks"] = True, {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(of_sums), flush=True)
        args.out.write_text(json.dumps(found, indent=1) + "\n")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
