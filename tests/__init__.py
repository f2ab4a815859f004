"""Tests of the whole tree."""

import os
from pathlib import Path

# Triton decides at its import whether kernels are compiled or interpreted, and transformers imports it: before all.
if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")

# Many processes compute beside each other here: threads of each would spend the cores on waiting for one another.
os.environ.setdefault("OMP_NUM_THREADS", "1")
