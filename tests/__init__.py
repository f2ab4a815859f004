"""Tests of the whole tree."""

import os
import sys
from pathlib import Path

# Triton decides at its import whether kernels are compiled or interpreted, and transformers imports it: before all.
if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")

# Many processes compute beside each other in a test run: threads of each would spend the cores on waiting for one
# another. A bench computes alone, with what threads its command names.
if "pytest" in sys.modules:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
