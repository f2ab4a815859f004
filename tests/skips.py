"""Which tests may be skipped on Linux, where CI runs: what is skipped there for any other reason fails.

A new reason belongs here only if it names hardware, or a program that a machine may lack and pip cannot install.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Generator

import pytest

_MAY = re.compile(
    r"CUDA|\bGPU\b|8-bit floats|one scale for a whole matrix|runs on CPUs alone|kernels are compiled here"
    r"|interpreted it would take minutes|\bC(\+\+)? compiler\b|not built for this CPU|on another CPU|no ps here"
    r"|without root there is no network of its own"
    r"|no (Chromium|curl|java|nginx|Helm|trained model|published tokenizers) on this machine|no JavaScript clients here"
)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """After each phase of a test."""
    report = yield
    _judge(report)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """After each file: one may be skipped as a whole."""
    report = yield
    _judge(report)
    return report


def _judge(report: pytest.TestReport | pytest.CollectReport) -> None:
    if not report.skipped or hasattr(report, "wasxfail") or sys.platform != "linux":
        return
    why = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
    if _MAY.search(why) is None:
        report.outcome = "failed"
        report.longrepr = f"{why}: no test is skipped for that on Linux (tests/skips.py says which are)"
