"""Tests of the whole tree."""

import os
from pathlib import Path

# Triton decides at its import whether kernels are compiled or interpreted, and transformers imports it: before all.
if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")
