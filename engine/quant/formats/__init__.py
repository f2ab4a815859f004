"""Quantised checkpoints as they are stored.

scheme.py reads what config.json says of all matrices; forms.py finds by its tensors whether one is quantised; one file
a form (gptq.py, awq.py, compressed.py, fp8.py) names them and their shapes, and unpacks them to what matrix.py has:
integers, scales, zero points, the order of the inputs. No form is known beyond here.
"""

from engine.quant.formats.forms import stored_as
from engine.quant.formats.matrix import Matrix, Quantised, stacked
from engine.quant.formats.scheme import Scheme, read_scheme
from engine.quant.formats.stored import Stored

__all__ = ["Matrix", "Quantised", "Scheme", "Stored", "read_scheme", "stacked", "stored_as"]
