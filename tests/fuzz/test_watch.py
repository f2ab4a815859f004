"""What is seen of a process from outside is what it had."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import pytest

from tests.fuzz.watch import processor_s

#: Burns so much processor time, says so, and waits.
BURN = "import time\nwhile time.process_time() < 0.3: pass\nprint(flush=True); input()"
#: The same in a child of its own.
CHILD = f"import subprocess, sys; sys.exit(subprocess.call([sys.executable, '-c', {BURN!r}]))"


@pytest.mark.parametrize("program", [BURN, CHILD])
def test_processor_time_is_that_of_a_process_and_its_children(program: str) -> None:
    argv = [sys.executable, "-c", program]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        assert 0.25 < processor_s(process.pid) < 5
        process.communicate(b"\n", timeout=240)
    with pytest.raises(FileNotFoundError):
        processor_s(process.pid)
    before = time.process_time()  # to look takes some, too
    assert processor_s(os.getpid()) >= before - 0.1
