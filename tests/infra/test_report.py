"""What the GPU check found is reported whole, also of parts that did not come to their end."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.processes import ROOT
from tests.waiting import until

XML = """<testsuites><testsuite name="pytest" errors="0" failures="1" skipped="2" tests="5" time="1.0">
<testcase classname="tests.engine.test_a" name="test_x"/>
<testcase classname="tests.engine.test_a" name="test_y"><failure message="no"/></testcase>
</testsuite></testsuites>"""


def reported(folder: Path, *parts: str) -> tuple[int, dict[str, Any]]:
    command = [sys.executable, "infra/gpu/report.py", str(folder), *parts]
    ran = subprocess.run(command, cwd=ROOT, check=False, capture_output=True, text=True)
    assert ran.stdout == (folder / "report.txt").read_text(), ran.stderr
    return ran.returncode, json.loads((folder / "report.json").read_text())


def test_parts_are_reported_as_far_as_they_got(tmp_path: Path) -> None:
    (tmp_path / "engine.xml").write_text(XML)
    (tmp_path / "engine.log").write_text("the log of the engine's tests")
    (tmp_path / "engine.status").write_text("1 12\n")
    (tmp_path / "parity.xml").write_text(XML.replace('<failure message="no"/>', ""))
    (tmp_path / "parity.log").write_text("cut short by the session's limit")
    (tmp_path / "parity.status").write_text("2 480\n")
    (tmp_path / "kernels.xml").write_text(XML[:99])
    (tmp_path / "kernels.log").write_text(
        "tests/engine/kernels/test_a.py::test_a[cuda-bf16] \n"
        "[gw0] [  1%] PASSED tests/engine/kernels/test_a.py::test_a[cuda-bf16] \n"
        "[gw11] [ 20%] FAILED tests/engine/kernels/test_a.py::test_b[a b] \n"
        "[gw0] [100%] SKIPPED tests/engine/kernels/test_a.py::test_c \n"
        "tests/engine/kernels/test_a.py::test_d "
    )
    measures = {
        "decode:64": {
            "batch": 64,
            "context": 1024.2,
            "step_ms": 8.0,
            "limit_ms": 5.6,
            "share": 0.7,
            "goal": 0.72,
            "met": False,
        },
        "prefill": {"error": "OutOfMemoryError: too much"},
    }
    figures = {
        "shape": "llama-8b",
        "gpu": "NVIDIA H200",
        "measures": measures,
        "compiled": {"built": ["k"], "from_cache": []},
    }
    (tmp_path / "bench.json").write_text(json.dumps(figures))
    (tmp_path / "bench.log").write_text("")
    status, found = reported(tmp_path, "engine", "kernels", "bench")
    assert status == 1
    assert found["tests"]["engine"] == {
        "exit_status": 1,
        "seconds": 12,
        "whole": True,
        "tests": 5,
        "skipped": 2,
        "failed": ["tests.engine.test_a::test_y"],
    }
    assert (found["tests"]["parity"]["tests"], found["tests"]["parity"]["whole"]) == (5, False)
    assert found["tests"]["kernels"] == {
        "exit_status": None,
        "seconds": None,
        "whole": False,
        "tests": 3,
        "skipped": 1,
        "failed": ["tests/engine/kernels/test_a.py::test_b[a b]"],
    }
    assert found["ended"] == {"bench": {"exit_status": None, "seconds": None}}
    table = (tmp_path / "report.md").read_text()
    assert "NVIDIA H200, llama-8b shape, bf16" in table
    assert "| a step at batch 64, context 1024 | 8.00 ms | 5.60 ms | 70 % | 72 % |" in table
    assert "| prefill | OutOfMemoryError: too much |" in table
    text = (tmp_path / "report.txt").read_text()
    assert "kernels compiled during the bench: k" in text
    assert "the log of the engine's tests" in text
    assert "test_d" in text


def test_parts_that_were_not_asked_for_now_decide_nothing(tmp_path: Path) -> None:
    for part, status in (("peer", 0), ("bench", 1)):
        (tmp_path / f"{part}.status").write_text(f"{status} 3\n")
        (tmp_path / f"{part}.log").write_text("")
    short = {"shape": "tiny", "measures": {"offline:8:60:20": {"output_tokens_per_s": 90.0}}}
    (tmp_path / "short.json").write_text(json.dumps(short))
    theirs = {"requests": 8, "prompt": 60, "output": 20, "transformers": "5", "output_tokens_per_s": 30.0}
    (tmp_path / "peer.json").write_text(json.dumps(theirs))
    status, found = reported(tmp_path, "peer")
    assert (status, found["figures"]["ratio"]) == (0, 3.0)
    assert reported(tmp_path, "bench", "peer")[0] == 1


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_check_takes_its_figures_on_a_cpu_and_leaves_them_when_it_is_ended(tmp_path: Path) -> None:
    measures = "decode:64,profile," + "offline," * 1000 + "offline"
    env = {**os.environ, "PYTHON": sys.executable}
    asked = ("bench", "peer", "--allow-cpu", "--out", str(tmp_path), "--measures", measures)
    command = [str(ROOT / "infra/gpu/check.sh"), *asked]
    process = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True)
    log = tmp_path / "bench.log"
    until(lambda: log.is_file() and "offline {" in log.read_text(), 200)
    process.terminate()
    out, _ = process.communicate(timeout=240)
    assert process.returncode == 1
    assert "bench: exit status None" in out
    assert not (tmp_path / "peer.log").exists()
    assert "a step at batch 8" in out
    found = json.loads((tmp_path / "report.json").read_text())["figures"]["bench"]["measures"]
    assert found["decode:64"]["steps"] > 10
    assert found["profile"]["parts_ms"]["dense"] > 0
    assert found["offline"]["output_tokens_per_s"] > 0
