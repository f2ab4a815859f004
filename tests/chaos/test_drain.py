"""A drain of many running sequences, in small: nothing lost, nothing twice, no death counted."""

from __future__ import annotations

import signal

import pytest

from tests.chaos.drain import measure
from tests.exhaustive import few
from tests.workers.rig import TIMES


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("how", few([signal.SIGTERM, signal.SIGQUIT], signal.SIGTERM))
def test_streams_go_on_elsewhere(how: signal.Signals) -> None:
    report = measure(40, 0.3, how, 0.2, then=0.005, boot=60.0, times=TIMES)
    assert (report.status, report.deaths, report.wrong) == (0, 0, 0)
