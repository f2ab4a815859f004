"""Makes quantised checkpoints from ordinary ones.

walk: cuts a calibration text into windows of tokens, and runs all of them through a model, layer by layer
model: rounds each product's matrices when the walk comes to it, with inputs that the rounded ones before it made, and
      writes the checkpoint; an encoder's matrices are rounded as they are
rounding: adds up these inputs, and rounds a matrix for them
compare: measures how far the quantised model differs
"""

from engine.quant.make.compare import Comparison, VectorComparison, compare, compare_encoders
from engine.quant.make.model import Recipe, quantise, quantise_encoder
from engine.quant.make.walk import windows

__all__ = [
    "Comparison",
    "Recipe",
    "VectorComparison",
    "compare",
    "compare_encoders",
    "quantise",
    "quantise_encoder",
    "windows",
]
