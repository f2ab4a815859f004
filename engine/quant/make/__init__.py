"""Quantised checkpoints made of ordinary ones.

text.py cuts a text into windows of tokens; walk.py takes them through a model layer by layer, with what each matrix is
multiplied with on the way; rounding.py rounds a matrix for that, and model.py does so for all of them, each layer
behind those that are rounded already, while folder.py writes; compare.py then tells by how much the outcome differs.
"""

from engine.quant.make.compare import Comparison, compare
from engine.quant.make.model import Recipe, quantise
from engine.quant.make.text import windows

__all__ = ["Comparison", "Recipe", "compare", "quantise", "windows"]
