"""The storage formats of quantised checkpoints.

scheme: reads config.json's description of the quantised matrices
forms: detects from a matrix's tensors whether it is quantised, and picks its format
gptq, awq, compressed, fp8: one format each; they name and shape its tensors (stored) and unpack them
matrix: the result, independent of the format: integers, scales, zero points, the order of the inputs
"""

from engine.quant.formats.forms import stored_as
from engine.quant.formats.matrix import Matrix, Quantised, stacked
from engine.quant.formats.scheme import Scheme, read_scheme
from engine.quant.formats.stored import Stored

__all__ = ["Matrix", "Quantised", "Scheme", "Stored", "read_scheme", "stacked", "stored_as"]
