"""Kernel sets under which a row's result does not depend, to the bit, on what else is computed beside it.

agreement.py finds out which sizes of a call give a row the same bits in every place, and calls nothing else; chunks.py
cuts a step's contexts at the same places whatever a step computes of them, attention.py attends to each chunk by itself
and joins them in order; cpu.py is the set that replaces these parts of the CPU's.
"""

from engine.kernels.deterministic.cpu import DeterministicCpu

__all__ = ["DeterministicCpu"]
