"""Makes quantised checkpoints from ordinary ones.

walk: cuts a calibration text into windows of tokens, and runs all of them through a model, layer by layer
model: rounds each product's matrices when the walk comes to it, with inputs that the rounded ones before it made, and
      writes the checkpoint
rounding: adds up these inputs, and rounds a matrix for them
compare: measures how far the quantised model differs
"""

from engine.quant.make.compare import Comparison, compare
from engine.quant.make.model import Recipe, quantise
from engine.quant.make.walk import windows

__all__ = ["Comparison", "Recipe", "compare", "quantise", "windows"]
