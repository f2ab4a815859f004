"""A kernel compiled ahead of time, and what that gave, as JSON: python -m ... FOLDER ARCH [ROWS]

A process of its own, since Triton chooses when it is imported whether kernels are compiled or interpreted.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from engine.kernels.triton.ahead import Build, compiling_for

VERSION = [int(number) for number in triton.__version__.split(".")[:2]]


@triton.jit(do_not_specialize=["count"])
def scale(x, out, count, stride, factor, BLOCK: tl.constexpr):
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    row = tl.load(x + place * stride, place < count, other=0.0).to(tl.float32)
    tl.store(out + place * stride, row * factor, place < count)


@triton.jit
def hungry(x, out, WIDTH: tl.constexpr):
    """Gathers by way of shared memory, all at once."""
    place = tl.arange(0, WIDTH)
    tl.store(out + place, tl.gather(tl.load(x + place), (place * 7) % WIDTH, 0))


def launch(dtype: torch.dtype, count: int, stride: int) -> None:
    """As a model would, knowing nothing of where it runs."""
    x = torch.empty(count * stride, dtype=dtype, device="meta")
    scale[(triton.cdiv(count, 256),)](x, torch.empty_like(x), count, stride, 0.5, BLOCK=256)


def shown(build: Build) -> dict[str, object]:
    return {
        "kernel": build.kernel,
        "key": build.key,
        "cached": build.cached,
        "seconds": build.seconds,
        "bytes": build.binary.stat().st_size,
        "shared": build.shared,
    }


def key_at_a_launch(arch: int) -> str:
    """The cache's key as Triton's compiler makes it for bfloat16 with an even stride, written out by hand."""
    signature = {"x": "*bf16", "out": "*bf16", "count": "i32", "stride": "i32", "factor": "fp32", "BLOCK": "constexpr"}
    attributes: dict[tuple[int], list[list[object]]] = {(place,): [["tt.divisibility", 16]] for place in (0, 1, 3)}
    if VERSION >= [3, 7]:
        attributes[5,] = []
    source = ASTSource(scale, signature, {(5,): 256}, attributes)
    compiled = triton.compile(source, target=GPUTarget("cuda", arch, 32))
    return Path(next(iter(compiled.metadata_group.values()))).parent.name


def main() -> None:
    cache, arch = Path(sys.argv[1]), sys.argv[2]
    found: dict[str, object] = {"triton": VERSION}
    with compiling_for(arch, cache) as builds:
        launch(torch.bfloat16, 1000, 16)
        launch(torch.bfloat16, 7, 16)  # no other specialisation: the count is not one
        launch(torch.bfloat16, 1000, 17)
        launch(torch.float32, 1000, 16)
        found["by hand"] = key_at_a_launch(int(arch[3:]))
    found["builds"] = [shown(build) for build in builds]
    try:
        with compiling_for("sm_89", cache):
            x = torch.empty(1 << 15, dtype=torch.float32, device="meta")
            hungry[(1,)](x, torch.empty_like(x), WIDTH=len(x), num_warps=32)
    except triton.runtime.errors.OutOfResources as error:
        found["refused"] = str(error)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
