"""The protocol's model is clean, and each of its rules is needed.

What runs here is small enough for every test run; `python -m tests.protocol.model` (and `--mutants`) checks all of it.
"""

from __future__ import annotations

import random
from itertools import permutations

import pytest

from tests.exhaustive import few
from tests.protocol.model import ALL, RULES, SCENARIOS, explore
from tests.protocol.model.canon import in_order, permuted, renamed
from tests.protocol.model.checks import good, wrong
from tests.protocol.model.scenarios import with_faults
from tests.protocol.model.state import Cfg
from tests.protocol.model.world import start, steps

SMALL = {
    "crash": with_faults(SCENARIOS["crash"], crash=1, expire=1),
    "lost": with_faults(SCENARIOS["lost"], lost=1, crash=1),
    "cancel": with_faults(SCENARIOS["cancel"], cancel=1, expire=1),
    "drain": with_faults(SCENARIOS["drain"], drain=1, lost=1),
    "retry": with_faults(SCENARIOS["retry"], retry=1, crash=1),
    "producer": with_faults(SCENARIOS["producer"], pcrash=1, cancel=1),
    "eager-producer": with_faults(SCENARIOS["eager-producer"], pcrash=1, cancel=1),
    "late-producer": with_faults(SCENARIOS["late-producer"], pcrash=1, lost=1, deadline=1),
    "alone": with_faults(SCENARIOS["alone"], expire=2, lost=1),
    "lapse": with_faults(SCENARIOS["lapse"], expire=2),
    "split": with_faults(SCENARIOS["split"], expire=2),
    "native": with_faults(SCENARIOS["native"], lost=1, crash=1),
    "native-old": with_faults(SCENARIOS["native-old"], crash=1, expire=1),
    "native-undone": with_faults(SCENARIOS["native-undone"], undo=1, lost=1),
    "native-books": with_faults(SCENARIOS["native-books"], crash=1),
    "plain": with_faults(SCENARIOS["plain"], crash=1),
    "poison": with_faults(SCENARIOS["poison"], crash=2),
    "slow": with_faults(SCENARIOS["slow"], crash=2),
    "broken": with_faults(SCENARIOS["broken"], dup=1, cancel=1),
    "reader": with_faults(SCENARIOS["reader"], drop=1, crash=1),
    "follow": with_faults(SCENARIOS["follow"], drop=1, drain=1),
    "follow-first": with_faults(SCENARIOS["follow-first"], drop=1),
    "follow-old": with_faults(SCENARIOS["follow-old"], drop=1, drain=1, crash=1),
    "sqs": with_faults(SCENARIOS["sqs"], dup=1, crash=1),
    "prompt": with_faults(SCENARIOS["prompt"], tail=1, crash=1, lost=1),
    "prompt-alone": with_faults(SCENARIOS["prompt-alone"], tail=1, drain=1, lost=1),
    "unread": with_faults(SCENARIOS["unread"], leave=1, lapse=1, lost=1),
    "two": with_faults(SCENARIOS["two"], crash=1),
    "orphan": with_faults(SCENARIOS["orphan"], cancel=1, crash=1, gone=1),
    "orphan-poison": with_faults(SCENARIOS["orphan-poison"], crash=2, gone=1),
    "scaled": with_faults(SCENARIOS["scaled"], crash=1, expire=1),
    "strays": with_faults(SCENARIOS["strays"], unack=1),
    "strays-slots": with_faults(SCENARIOS["strays-slots"], unack=1),
    "pools-lapse": with_faults(SCENARIOS["pools-lapse"], expire=1, drain=1),
    "pools-held": with_faults(SCENARIOS["pools-held"], hold=1, drain=1),
    "levels": with_faults(SCENARIOS["levels"], crash=1),
    "levels-pools": with_faults(SCENARIOS["levels-pools"], crash=2),
    "versions": with_faults(SCENARIOS["versions"], crash=1, drain=1),
    "outbox": with_faults(SCENARIOS["outbox"], crash=1, cancel=1, dcrash=1),
    "delete": with_faults(SCENARIOS["delete"], delete=1, crash=1),
    "delete-running": with_faults(SCENARIOS["delete-running"], delete=1, crash=1, lost=1),
    "delete-plain": with_faults(SCENARIOS["delete-plain"], delete=1, crash=1),
    "delete-producer": with_faults(SCENARIOS["delete-producer"], delete=1, pcrash=1),
    "revoke": with_faults(SCENARIOS["revoke"], revoke=1, crash=1),
    "revoke-running": with_faults(SCENARIOS["revoke-running"], revoke=1, expire=1),
    "again": with_faults(SCENARIOS["again"], again=1, delete=1),
    "outbox-rows": with_faults(SCENARIOS["outbox-rows"], stall=1, refuse=2),
    "outbox-untaken": with_faults(SCENARIOS["outbox-untaken"], stall=1, untaken=1),
    "outbox-undone": with_faults(SCENARIOS["outbox-undone"], undo=1, unmark=1, dcrash=1),
    "alive": with_faults(SCENARIOS["alive"], suspend=1, deaf=1),
    "alive-crash": with_faults(SCENARIOS["alive-crash"], crash=2),
    "alive-cut": with_faults(SCENARIOS["alive-cut"], suspend=1, cut=1, crash=1),
    "alive-cut-again": SCENARIOS["alive-cut-again"],
    "alive-uncounted": SCENARIOS["alive-uncounted"],
    "alive-split": with_faults(SCENARIOS["alive-split"], suspend=1, deaf=2),
    "alive-counts": with_faults(SCENARIOS["alive-counts"], suspend=1, deaf=1),
    "alive-old": with_faults(SCENARIOS["alive-old"], crash=1),
    "books": with_faults(SCENARIOS["books"], crash=1, late=1),
    "books-lapse": with_faults(SCENARIOS["books-lapse"], expire=1),
    "books-drain": with_faults(SCENARIOS["books-drain"], drain=1),
    "books-retry": with_faults(SCENARIOS["books-retry"], retry=1),
    "books-reap": with_faults(SCENARIOS["books-reap"], crash=1),
    "books-later": with_faults(SCENARIOS["books-later"], later=1, crash=1),
    "books-scaled": with_faults(SCENARIOS["books-scaled"], crash=1),
    "books-old": with_faults(SCENARIOS["books-old"], age=1),
    **{
        name: SCENARIOS[name]
        for name in (
            *("rival", "killer", "killer-copies", "killer-plain", "turned", "innocent", "innocent-both", "sqs-lost"),
            *("orphan-plain", "compact", "undone", "undone-plain", "undone-alone", "pools", "versions-sent"),
            *("outbox-plain", "outbox-unread", "books-tidy", "books-producer", "books-broken", "books-killer"),
            *("books-killed", "books-innocent", "books-undone", "levels-sent"),
        )
    },
}

#: The faults that show what a rule is for, where they are not those of its small world.
FAULTS: dict[str, dict[str, int]] = {
    "admit_absent": {"lost": 1, "cancel": 1},
    "submit_window": {"lost": 1, "cancel": 1, "ttl": 1},
    "gone_drop": {"lost": 1, "cancel": 1, "ttl": 1},
    "owner_first": {"expire": 1, "deadline": 1},
    "append_final": {"expire": 1, "deadline": 1},
    "expire_submitting": {"pcrash": 1, "deadline": 1},
    "expire_cancel": {"expire": 1, "cancel": 1, "deadline": 1},
    "late_begun": {"expire": 1, "deadline": 1},
    "settle_claimed": {"dup": 1},
    "release_fence": {"dup": 1, "drain": 1, "lost": 1},
    "not_busy_back": {"expire": 1},
    "ack_uuid": {"dup": 1, "crash": 1},
    "letter_noted": {"crash": 3},
    "claim_lease": {"expire": 1, "lost": 1, "crash": 1},
    "finish_next": {"tail": 1},
    "prompt_fence": {"expire": 1, "deadline": 1},
    "prompt_once": {"lost": 1},
    "prompt_first": {"tail": 1},
    "due_kept": {"later": 1, "pcrash": 1},
    "row_lease": {"dcrash": 1},
    "row_holder": {"lost": 1, "replay": 1},
    "dead_kept": {"refuse": 2},
}


#: Worlds with more than a thousand states: `make test` takes them with only their last fault, if they have several.
MANY = {
    *("crash", "lapse", "split", "alone", "cancel", "producer", "eager-producer", "late-producer", "rival", "turned"),
    *(
        "reader",
        "follow",
        "follow-old",
        "sqs",
        "sqs-lost",
        "pools",
        "pools-lapse",
        "versions-sent",
        "orphan-plain",
        "outbox",
        "outbox-plain",
    ),
    *("outbox-rows", "outbox-undone", "outbox-unread", "delete", "delete-producer", "alive", "alive-crash"),
    *("alive-cut", "alive-cut-again", "alive-uncounted", "alive-counts", "alive-split", "books", "books-broken"),
    *("books-innocent", "books-lapse"),
    *("books-later", "books-producer", "books-reap", "books-tidy", "books-undone", "outbox-untaken", "levels-pools"),
}
#: The rules without which something breaks only beyond as many states: left to `make test-all`.
LATE = {
    *("claim_lease", "claim_live", "cancel_submitting", "delete_ends", "expire_submitting", "letter_deleted"),
    *("reap_given", "tidy", "lost_anew", "busy_no_ack", "join_anew", "joins_said"),
}


def with_last_fault(cfg: Cfg) -> Cfg:
    last = max(place for place, budget in enumerate(cfg.budget) if budget)
    return cfg._replace(budget=tuple(int(place == last) for place in range(len(cfg.budget))))


@pytest.mark.parametrize(
    "cfg",
    [
        *(pytest.param(cfg, id=name, marks=[pytest.mark.exhaustive] * (name in MANY)) for name, cfg in SMALL.items()),
        *(
            pytest.param(with_last_fault(cfg), id=f"{name}-one-fault")
            for name, cfg in SMALL.items()
            if name in MANY and sum(cfg.budget) > 1
        ),
    ],
)
def test_every_history_keeps_the_invariants_and_ends_well(cfg: Cfg) -> None:
    verdict = explore(cfg)
    assert not verdict.says, "\n".join([verdict.says, *verdict.trace])


#: One of each scenario. `make test` takes a fifth of them.
SOON = {rule.scenario: name for name, rule in reversed(RULES.items()) if name not in LATE}


@pytest.mark.parametrize("name", few(RULES, *[*SOON.values()][::5]))
def test_without_the_rule_something_breaks(name: str) -> None:
    rule = RULES[name]
    cfg = with_faults(SCENARIOS[rule.scenario], **FAULTS[name]) if name in FAULTS else SMALL[rule.scenario]
    verdict = explore(cfg, ALL - {name, *rule.behind}, limit=30_000)
    assert verdict.says[:1] == "S", f"{verdict.says or 'nothing broke'} without: {rule.says}"


@pytest.mark.parametrize("name", ["split", "innocent-both", "three", "strays"])
def test_it_does_not_matter_which_worker_or_slot_is_which(name: str) -> None:
    """What `canon` builds on: along some histories, each way to number them has the same steps, to the same worlds."""
    cfg, rng = SCENARIOS[name], random.Random(name)
    ways = [
        (workers, slots)
        for workers in permutations(sorted(set(cfg.workers)))
        for slots in permutations(range(len(cfg.workers)))
        if all(workers[cfg.workers[k]] == cfg.workers[i] for k, i in enumerate(slots))
    ]
    assert len(ways) > 1
    s = start(cfg)
    for _ in range(60):
        nexts = [(fair, after) for _, fair, after in steps(s, cfg, ALL)]
        numbered = [(workers, slots, permuted(s, workers, slots, cfg)) for workers, slots in ways]
        assert renamed(in_order(s, cfg), cfg) in [renamed(other, cfg) for *_, other in numbered]
        for workers, slots, other in numbered:
            assert (wrong(other, cfg), good(other, cfg)) == (wrong(s, cfg), good(s, cfg))
            there = {(fair, renamed(after, cfg)) for _, fair, after in steps(other, cfg, ALL)}
            assert there == {(fair, renamed(permuted(after, workers, slots, cfg), cfg)) for fair, after in nexts}
        s = renamed(rng.choice(nexts)[1], cfg) if nexts else start(cfg)


def test_every_rule_names_a_scenario_that_shows_it() -> None:
    assert {rule.scenario for rule in RULES.values()} <= set(SCENARIOS)
    assert all(set(rule.behind) <= ALL for rule in RULES.values())
