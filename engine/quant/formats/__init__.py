"""The storage formats of quantised checkpoints.

scheme: reads config.json's description of the quantised matrices
stored: detects from a matrix's tensors whether it is quantised, and in which format (GPTQ, AWQ, compressed-tensors,
        fp8); a class for each names and shapes its tensors, and unpacks them
matrix: the result, independent of the format: integers, scales, zero points, the order of the inputs
"""

from engine.quant.formats.matrix import Matrix, Quantised, stacked
from engine.quant.formats.scheme import Scheme, read_scheme
from engine.quant.formats.stored import NarrowedStored, Stored, stored_as

__all__ = ["Matrix", "NarrowedStored", "Quantised", "Scheme", "Stored", "read_scheme", "stacked", "stored_as"]
