"""The runner for accelerators: what a step needs is kept there, made there and, where it can be, replayed there.

DeviceRows (rows) keep each running sequence's block tables and last token on the device; a step sends their differences
and four numbers a row, in one copy through the PinnedRing (ring); InputMaker (inputs) makes tokens, positions and
places of them there. DeviceRunner (runner) runs the model on these, a step of decodes as a recorded graph (graphs), and
samples; results come back by a copy that only `collect` waits for. DeviceSampler (sampler) keeps how each sequence
wants its tokens chosen in permanent rows, too (sampling_rows, edit_state), and chooses them there, by kernels or by
what plain_sampling has in plain torch. How much memory is left for the KV cache is what `step_bytes` (footprint) finds
out by running the largest steps. `rehearse` (rehearsal) compiles and records what serving needs before it begins.
"""

from engine.execution.device.footprint import step_bytes
from engine.execution.device.rehearsal import rehearse
from engine.execution.device.runner import DeviceRunner

__all__ = ["DeviceRunner", "rehearse", "step_bytes"]
