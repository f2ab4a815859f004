"""Kernel sets for CUDA in which a row's result does not depend, to the bit, on other rows: `gpu`. On a CPU the native
set is one."""
