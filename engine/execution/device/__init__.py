"""The runner for accelerators: keeps its state on the device, makes a step's inputs there and replays recorded steps.

rows: DeviceRows keep each running sequence's block tables and last token on the device
inputs: a step sends their changes and four numbers a row in one copy through the PinnedRing; InputMaker makes tokens,
       positions and KV slots from them on the device
runner, graphs: DeviceRunner runs the model, decode steps as recorded CUDA graphs, and samples; only `collect` waits
sampler: DeviceSampler keeps sampling parameters in permanent rows (edit_state) and chooses tokens on
        the device, by kernels or in plain torch (plain_sampling)
rehearsal: `step_bytes` measures the largest steps, to size the KV cache; `rehearse` compiles and records what serving
           needs before it begins
"""

from engine.execution.device.rehearsal import rehearse, step_bytes
from engine.execution.device.runner import DeviceRunner

__all__ = ["DeviceRunner", "rehearse", "step_bytes"]
