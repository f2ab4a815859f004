"""Kernel sets in which a row's result does not depend, to the bit, on other rows.

agreement: finds by trial the call sizes that give a row the same bits in every place, and calls only those
chunks: cuts contexts into chunks at fixed places, whatever part of them a step computes
attention: attends to each chunk by itself and joins the results in order
cpu, gpu: the sets for CPUs and for CUDA
"""

from engine.kernels.deterministic.cpu import DeterministicCpu

__all__ = ["DeterministicCpu"]
