"""Makes quantised checkpoints from ordinary ones.

text: cuts a calibration text into windows of tokens
walk: runs the windows through a model layer by layer, and shows the inputs of each matrix
rounding: rounds a matrix for those inputs; model: rounds all matrices, each layer after the rounded ones before it
folder: writes the checkpoint; compare: measures how far the quantised model differs
"""

from engine.quant.make.compare import Comparison, compare
from engine.quant.make.model import Recipe, quantise
from engine.quant.make.text import windows

__all__ = ["Comparison", "Recipe", "compare", "quantise", "windows"]
