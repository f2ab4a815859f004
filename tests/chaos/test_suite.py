"""The suite's short form: a few seconds of harm, on systems of their own, judged by the checker.

`make test` has every kind of fault on one system that asks for keys. `make test-all` also has a system for some kinds
at a time, and two with SQS: of its faults, tests/workers/sqs/test_worker.py and tests/protocol/test_sqs.py have one at
a time. The long form is `python -m tests.chaos`.
"""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from tests.chaos import clock
from tests.chaos.driver import ALL_KINDS, SQS_KINDS, plan_of, run
from tests.chaos.stage import Shape
from tests.exhaustive import few

#: Name -> (first seed whose plan may be taken, kinds of faults, seconds, what is different about the stage).
FORMS: dict[str, tuple[int, tuple[str, ...], float, Shape]] = {
    "kills": (11, ("kill",), 7.0, Shape(clients=2, open_tasks=8)),
    "pauses and drains": (12, ("pause", "drain"), 7.0, Shape(gateways=2, clients=2, open_tasks=8)),
    "servers": (13, ("restart", "full"), 6.0, Shape()),
    "one server, links": (14, ("refuse", "silence", "deaf", "mute", "delay", "cut"), 8.0, Shape(servers=1)),
    "deliveries, while kills": (15, ("double", "shuffle", "kill"), 6.0, Shape(seqs=4)),
    "clocks": (16, ("clock", "kill"), 6.0, Shape(settable_clocks=True)),
    "SQS": (18, ("kill",), 5.0, Shape(sqs=True, servers=1)),
    "SQS, everything": (19, SQS_KINDS, 15.0, Shape(sqs=True, servers=1, clients=2)),
    "keys": (20, ("kill",), 7.0, Shape(keys=True, gateways=2)),
    "everything": (17, ALL_KINDS, 10.0, Shape(settable_clocks="clock" in ALL_KINDS, keys=True)),
}


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("form", few(FORMS, "everything"))
def test_every_promise_is_kept(form: str) -> None:
    seed, kinds, seconds, shape = FORMS[form]
    if "clock" in kinds and not clock.available():
        pytest.skip("setting a process's clock takes Linux and a C compiler (cc)")
    shape = replace(shape, variants=24, longest=90, forked=True, hasty=True)
    pause = (0.2, 1.0) if form in ("SQS", "everything") else (0.4, 2.4)
    plans = (plan_of(one, shape, seconds=seconds, kinds=kinds, pause=pause) for one in itertools.count(seed))
    plan = next(plan for plan in plans if {fault.kind for fault in plan.faults} == {*kinds})
    outcome = run(plan, command=f"python -m tests.chaos --seed {plan.seed}")
    assert outcome.report.fine, outcome.say()
    assert outcome.report.compared, "no task got through"
