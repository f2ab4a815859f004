"""A test that is skipped for a reason that nobody has judged fails."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.exhaustive import few

HARDWARE = "import pytest\n\ndef test_it() -> None:\n    pytest.skip('no CUDA device')\n"
UNJUDGED = HARDWARE.replace("no CUDA device", "today is Sunday")
ABSENT = "import pytest\npytest.importorskip('no_such_package')\n\ndef test_it() -> None:\n    pass\n"


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere any test may be skipped")
@pytest.mark.parametrize(
    ("code", "said"),
    few(
        [
            (HARDWARE, "1 skipped"),
            (UNJUDGED, "Skipped: today is Sunday: no test is skipped for that on Linux"),
            (ABSENT, "could not import 'no_such_package'"),
        ],
        (UNJUDGED, "Skipped: today is Sunday: no test is skipped for that on Linux"),
    ),
    ids=["hardware", "unjudged", "absent"],
)
def test_only_hardware_excuses(tmp_path: Path, code: str, said: str) -> None:
    (tmp_path / "test_one.py").write_text(code)
    command = [sys.executable, "-m", "pytest", "-p", "tests.skips", "-p", "no:cacheprovider", str(tmp_path)]
    ran = subprocess.run(command, capture_output=True, text=True, check=False, timeout=240)
    assert said in ran.stdout
    assert (ran.returncode == 0) == (code == HARDWARE)
