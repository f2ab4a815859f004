"""Tenants who wait in a tier are served alike, in tokens by weight, whatever each of them sends."""

from __future__ import annotations

from itertools import combinations

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from engine.plan import Sampled
from engine.request import Tier
from engine.scheduling.policy import Shares
from engine.scheduling.scheduler import Scheduler
from engine.sequence import Status
from tests.engine.stepping import request, rows, scheduler, step
from tests.histories import examples

ROWS = 4
LONGEST = 24


class Served:
    """Steps a scheduler by hand; counts what each tenant was served, and how far apart those who wait are."""

    def __init__(self, weights: dict[str, float], **settings: object) -> None:
        self.weights = weights
        self.scheduler: Scheduler = scheduler(
            num_blocks=64, max_num_seqs=ROWS, max_num_batched_tokens=16, enable_prefix_caching=False, **settings
        )
        self.served = dict.fromkeys(weights, 0.0)
        self.reached: dict[str, int] = {}
        self.sent = 0
        #: Of each pair who both wait: how far apart they were, at most either way, since they both began to.
        self.apart: dict[tuple[str, str], list[float]] = {}

    def send(self, tenant: str, prompt: int, output: int, tier: Tier = Tier.DEFAULT) -> None:
        self.sent += 1
        self.scheduler.add(
            request(
                f"{tenant}{self.sent}",
                prompt,
                tier,
                arrival=float(self.sent),
                max_tokens=output,
                ignore_eos=True,
                tenant=tenant,
                weight=self.weights[tenant],
            )
        )

    def step(self) -> None:
        self.note_who_waits()
        plan = self.scheduler.schedule(1e6)
        assert plan is not None
        live = len(self.scheduler._groups)
        assert len(plan.rows) == min(ROWS, live) or plan.num_tokens == 16, "there was room for somebody who waits"
        for row in plan.rows:
            one = row.seq.request
            end = row.start + row.count
            self.served[one.tenant] += max(0, end - self.reached.get(one.id, 0)) / one.weight
            self.reached[one.id] = max(end, self.reached.get(one.id, 0))
        self.scheduler.update(plan, [Sampled(1) for row in plan.rows if row.samples], 1e6)

    def note_who_waits(self) -> None:
        groups = self.scheduler._groups.values()
        waiting = {g.request.tenant for g in groups if any(seq.status is Status.WAITING for seq in g.seqs)}
        for pair in combinations(sorted(self.served), 2):
            if waiting.issuperset(pair):
                gap = self.served[pair[0]] - self.served[pair[1]]
                low, high = self.apart.get(pair, (gap, gap))
                self.apart[pair] = [min(low, gap), max(high, gap)]
                assert self.apart[pair][1] - self.apart[pair][0] <= self.bound
            else:
                self.apart.pop(pair, None)

    @property
    def bound(self) -> float:
        """As `shares.py` states it."""
        return 2 * ROWS * LONGEST / min(self.weights.values())


bursts = st.lists(
    st.tuples(
        st.sampled_from("abc"),
        st.integers(1, 60),  # requests
        st.integers(1, 16),  # tokens of each prompt
        st.integers(1, 8),  # of each output
        st.integers(0, 120),  # steps until the next burst
    ),
    min_size=4,
    max_size=14,
)


@given(bursts, st.sampled_from([(1.0, 1.0, 1.0), (4.0, 1.0, 2.0)]))
@settings(max_examples=examples(5, 15), deadline=None, derandomize=True, phases=[Phase.generate])
def test_the_service_of_waiting_tenants_differs_by_a_bound_and_none_starves(bursts, weights):
    served = Served(dict(zip("abc", weights, strict=True)))
    for tenant, count, prompt, output, steps in bursts:
        for _ in range(count):
            served.send(tenant, prompt, output)
        for _ in range(steps):
            if served.scheduler.has_work:
                served.step()
    for _ in range(served.sent * LONGEST):
        if not served.scheduler.has_work:
            break
        served.step()
    assert not served.scheduler.has_work
    served.scheduler.check_integrity()


@pytest.mark.parametrize("weight", [1.0, 3.0])
def test_a_flood_leaves_others_their_share_from_their_first_request_on(weight):
    served = Served({"flood": 1.0, "other": weight})
    for _ in range(400):
        served.send("flood", 4, 8)
    for _ in range(40):
        served.step()
    for _ in range(200):
        served.send("other", 2, 4)
    before = dict(served.served)
    for _ in range(100):
        served.step()
    flood, other = (served.served[name] - before[name] for name in ("flood", "other"))
    assert abs(flood - other) <= ROWS * 12
    assert flood > 80


def test_a_rest_saves_nothing_up():
    served = Served({"busy": 1.0, "idle": 1.0})
    served.send("idle", 2, 2)
    for _ in range(300):
        served.send("busy", 4, 8)
    for _ in range(300):
        served.step()
    for _ in range(100):
        served.send("idle", 4, 8)
    before = dict(served.served)
    for _ in range(60):
        served.step()
    assert served.served["busy"] - before["busy"] >= served.served["idle"] - before["idle"] - ROWS * 12


def test_who_asks_one_at_a_time_is_served_no_more_than_its_share():
    served = Served({"many": 1.0, "single": 1.0})
    for _ in range(300):
        served.send("many", 2, 2)
    for _ in range(150):
        if not any(g.request.tenant == "single" for g in served.scheduler._groups.values()):
            served.send("single", 12, 12)
        served.step()
    assert served.served["single"] <= served.served["many"] + ROWS * 24


def test_an_aged_request_does_not_wait_for_fresh_ones_of_tenants_who_had_less():
    s = scheduler(max_num_seqs=1, ageing_s=10.0)
    s.add(request("first", 4, Tier.BATCH, tenant="heavy", max_tokens=30))
    while s.has_work:
        step(s)
    s.add(request("aged", 4, Tier.BATCH, tenant="heavy", arrival=0.0, max_tokens=3))
    served = []
    for second in range(40, 60):
        s.add(request(f"p{second}", 4, Tier.PRIORITY, tenant=f"new{second}", arrival=float(second), max_tokens=1))
        served += rows(step(s, now=float(second))[0])
        if "aged" in served:
            break
    assert len(served) <= 2


def test_for_want_of_blocks_the_one_whose_tenant_had_most_is_put_out():
    s = scheduler(num_blocks=9, enable_prefix_caching=False)
    s.add(request("heavy1", 7, tenant="heavy", arrival=0.0, max_tokens=9))
    s.add(request("heavy2", 7, tenant="heavy", arrival=1.0, max_tokens=9))
    s.add(request("light", 7, tenant="light", arrival=2.0, max_tokens=9))
    step(s)
    s.add(request("heavy3", 3, tenant="heavy", arrival=3.0, max_tokens=9))
    while not (out := s.preempted(0.0)):
        step(s)
    assert [name for name, _ in out] == ["heavy3"] or [name for name, _ in out] == ["heavy2"]


def test_tokens_computed_again_are_not_charged():
    s = scheduler(max_num_seqs=1)
    s.add(request("batch", 8, Tier.BATCH, tenant="t", max_tokens=4))
    step(s)
    account = s._planner.running[0].account
    paid = account.served
    s.add(request("p", 2, Tier.PRIORITY, max_tokens=1))
    assert list(rows(step(s)[0])) == ["p"]
    assert rows(step(s)[0])["batch"] == (8, 1) or account.served == paid + 1
    assert account.served == paid + 1


def test_accounts_of_those_who_are_gone_are_forgotten():
    shares = Shares(1)
    waits = shares.open(0, "waits")
    for number in range(1000):
        account = shares.open(0, f"t{number}")
        shares.admitted(account)
        account.served += 10
        shares.close(account)
        waits.served += 5
        shares.admitted(waits)
    assert len(shares) < 10
    shares.close(waits)
    assert len(shares) == 0
