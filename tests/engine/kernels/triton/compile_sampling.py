"""The sampling kernels, compiled ahead; what each takes, as JSON: python -m ... FOLDER

A process of its own, since Triton chooses when it is imported whether kernels are compiled or interpreted.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import torch
import triton.backends.nvidia

from engine.kernels.sampling_state import WIDTH, EditState, Features, SamplingState
from engine.kernels.triton.ahead import compiling_for
from engine.kernels.triton.sampling.sampler import TritonChoose

_CUOBJDUMP = Path(triton.backends.nvidia.__file__).parent / "bin" / "cuobjdump"


def launch(vocab: int, dtype: torch.dtype, *ways: Features) -> None:
    slots, meta = 64, torch.device("meta")

    def empty(*size: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=meta)

    edits = EditState(
        counts=empty(slots, vocab),
        bias_ids=empty(slots, 1024),
        biases=empty(slots, 1024, dtype=torch.float32),
        masks=empty(slots, 2, -(-vocab // 32)),
    )
    state = SamplingState(
        empty(slots, WIDTH), empty(slots, dtype=torch.int64), empty(2, slots, dtype=torch.int64), edits
    )
    choose = TritonChoose(slots, vocab, meta)
    for features in ways:
        rows = empty(8, vocab, dtype=dtype)
        choose(rows, empty(8), empty(8, dtype=torch.int64), state, features)


def main() -> None:
    with compiling_for("sm_90", Path(sys.argv[1])) as builds:
        launch(128256, torch.bfloat16, Features(0), Features.EDITS | Features.FILTERS)
        launch(262144, torch.float32, Features.FILTERS)
    found = []
    for build in builds:
        command = [_CUOBJDUMP, "--dump-resource-usage", build.binary]
        usage = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()[-1]
        found.append({"kernel": build.kernel, "shared": build.shared, "usage": usage.split()})
    print(json.dumps(found))


if __name__ == "__main__":
    main()
