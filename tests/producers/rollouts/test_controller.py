"""Rollouts that judge: promoted, held and rolled back by themselves, whoever dies between any two lines."""

from __future__ import annotations

import itertools
import json
import re
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest
from redis import Redis
from redis.exceptions import ConnectionError as LostConnection
from redis.exceptions import ResponseError

from producers import AsyncClient
from producers.admin import routes
from producers.admin.fleet import Fleet, Pool
from producers.admin.roles import ROLES
from producers.connection.script import text
from producers.contract import keys
from producers.contract.stream import encode_token
from producers.rollouts import operations
from producers.rollouts.controller import Controller, act, end_deleted, start_trouble
from producers.rollouts.metrics import Evidence, defaults, usual
from producers.rollouts.operations import RolloutError
from producers.rollouts.report import report
from producers.store.fleet import canaries, cards, rollouts, routing
from producers.store.fleet.canaries import ALIAS, Canary, Plan
from producers.store.fleet.rollouts import Rollout
from producers.store.fleet.routing import Shadow
from tests.waiting import PATIENCE_S

PLAN = Plan(steps=(10.0, 50.0), hold_s=0.0, min_samples=5, lost_s=0.0, warm_up_s=0.0, block_s=0.0)
UP = Fleet([Pool("m@b.f", "m", workers=[{"worker": "w"}])])
DOWN = Fleet([])


def card(version: str) -> dict[str, Any]:
    return {"v": 1, "name": "m", "version": version, "context_length": 1000, "files": {}, "capabilities": ["chat"]}


@pytest.fixture
def store(valkey: Redis) -> Redis:
    """A model of two versions: `a` is the default."""
    cards.publish(valkey, card("a"), {})
    cards.add_version(valkey, card("b"), {})
    return valkey


class Dying(Redis):
    """Dies with its n-th command: before the server has it (`before`), or after."""

    remaining, before = 10**9, True

    def execute_command(self, *args: Any, **options: Any) -> Any:
        self.remaining -= 1
        if self.remaining == 0 and self.before:
            raise LostConnection("died before")
        answer = super().execute_command(*args, **options)  # type: ignore[no-untyped-call]
        if self.remaining == 0:
            raise LostConnection("died after")
        return answer


class Looks(Controller):
    """A controller whose fleet the test gives, on its own connection."""

    def __init__(self, store: Redis) -> None:
        self._store, self._matchers, self._lost = store, {}, {}


def state_of(store: Redis) -> Canary:
    state = canaries.read(store, "m")
    assert state is not None
    return state


def look(store: Redis, fleet: Fleet = UP, times: int = 1) -> Canary:
    """Looks of one controller after another, each new."""
    for _ in range(times):
        state = state_of(store)
        if state.under_way:
            Looks(store).look(state, fleet)
    return state_of(store)


def part(store: Redis) -> tuple[str, float | None, str | None]:
    """The default, the candidate's percentage, and what its alias names."""
    state = routes.current(store, "m")
    return state.default, state.split.get(ALIAS), state.aliases.get(ALIAS)


def ended(store: Redis, count: int, *, baseline: dict[str, Any] | None = None, **more: Any) -> None:
    """Tasks end, as rows of the ledger: as many of the candidate, with `more`, each after eight of the `baseline`."""
    now = canaries.now_ms(store)
    usual: dict[Any, Any] = {
        "id": "t",
        "status": "completed",
        "key": "",
        "tenant": "",
        "model": "m",
        "tier": "default",
        "prompt": 5,
    }
    usual |= {"cached": 0, "output": 9, "discarded": 0, "deaths": 0, "longest": 9, "generation": 1, "drawn": 1}
    usual |= dict.fromkeys(("created", "started", "first"), now)
    with store.pipeline(transaction=False) as pipe:
        for number in range(9 * count):
            arm: dict[Any, Any] = (
                {"version": "a", "alias": "default", **(baseline or {})}
                if number % 9 < 8
                else {"version": "b", "alias": ALIAS, **more}
            )
            pipe.xadd(keys.LEDGER, {**usual, **arm})
        pipe.execute()


def did(store: Redis) -> list[str]:
    """Decisions, in their order."""
    return [row["what"] for row in canaries.rows(store, "m") if row["what"] not in ("seen", "acted")]


def started(store: Redis, plan: Plan = PLAN, to: str = "b") -> Canary:
    return operations.start(store, "m", to, plan)


def test_a_candidate_that_is_no_worse_is_promoted_step_by_step(store: Redis) -> None:
    assert (started(store).phase, part(store)) == ("preparing", ("a", None, "b"))
    record = rollouts.read(store, "m")
    assert record is not None
    assert (record.phase, record.version, record.workers) == ("starting", "b", 1), "autoscalers bring its workers up"
    assert look(store, DOWN).phase == "preparing"
    assert (look(store).percent, part(store)) == (10.0, ("a", 10.0, "b"))
    assert look(store).percent == 10.0, "nothing was compared yet"
    for percent in (50.0, 0.0):
        ended(store, 6)
        assert look(store).percent == percent
    assert (state_of(store).phase, part(store)) == ("promoted", ("b", None, None))
    assert did(store) == ["start", "raise", "raise", "promote"]
    record = rollouts.read(store, "m")
    assert record is not None
    assert record.phase == "draining", "the baseline can be started again"
    with pytest.raises(RolloutError, match="models alias m default=a"):
        operations.abort(store, "m")
    routes.set_aliases(store, "m", {"default": "a"})
    started(store)
    record = rollouts.read(store, "m")
    assert record is not None
    assert (record.phase, record.version) == ("starting", "b"), "once more"


def test_a_state_that_a_release_without_some_field_has_written_is_changed_too(store: Redis) -> None:
    started(store)
    fields = json.loads(store.hget(keys.CANARIES, "m") or "")
    del fields["plan"]["refusals"]
    store.hset(keys.CANARIES, "m", json.dumps(fields))
    assert look(store).percent == 10.0


def test_a_candidate_that_fails_is_rolled_back_at_the_first_step_and_says_why(store: Redis) -> None:
    started(store)
    look(store)
    ended(store, 20, status="failed", first="")
    state = look(store)
    assert (state.phase, part(store)) == ("rolled_back", ("a", None, None))
    assert state.reason.startswith("failed: tasks that failed")
    assert did(store) == ["start", "raise", "roll_back"]
    record = rollouts.read(store, "m")
    assert record is not None
    assert (record.phase, record.reason) == ("failed", state.reason), "its workers end"


@pytest.mark.parametrize(
    ("candidate", "baseline", "phase", "metric"),
    [
        ({"deaths": 1}, {}, "rolled_back", "failed"),  # it crashes its workers
        ({"first": 9 * 10**12, "created": 1}, {"created": 1}, "rolled_back", "first_token"),
        ({}, {"status": "failed", "first": ""}, "promoted", ""),
        ({}, {"deaths": 1}, "promoted", ""),
    ],
)
def test_one_that_crashes_or_is_slow_is_rolled_back_and_one_that_is_better_is_promoted(
    store: Redis, candidate: dict[str, Any], baseline: dict[str, Any], phase: str, metric: str
) -> None:
    started(store)
    store.hset(keys.CANARIES, "m", replace(state_of(store), traffic=1).to_json())
    look(store)
    for _ in range(5):
        ended(store, 8, baseline=baseline, **candidate)
        look(store)
    assert state_of(store).phase == phase
    assert state_of(store).reason.startswith(f"{metric}: ") == bool(metric)


def test_one_that_only_looks_worse_is_held_and_a_paused_one_is_still_rolled_back(store: Redis) -> None:
    started(store)
    look(store)
    ended(store, 8, status="failed")
    assert (look(store).phase, state_of(store).percent) == ("judging", 10.0)
    operations.pause(store, "m")
    ended(store, 10, status="failed")
    assert look(store).phase == "rolled_back"


def answered(store: Redis, count: int, text_: str) -> None:
    """Tasks end completed, with their records and streams: the candidate's with this answer."""
    before = store.xlen(keys.LEDGER)
    ended(store, count)
    rows: Any = store.xrange(keys.LEDGER)
    for number, (entry, fields) in enumerate(rows[before:]):
        store.xdel(keys.LEDGER, entry)
        name = f"{text(entry)}.{number}"
        store.xadd(keys.LEDGER, {**fields, b"id": name})
        store.hset(keys.task(name), mapping={"reasons": '["stop"]'})
        answer = text_ if fields[b"alias"] == ALIAS.encode() else "Here is what you want."
        for index, word in enumerate(answer.split(" ")):
            store.xadd(keys.stream(name), {"e": encode_token(0, index, 1, f" {word}")})


@pytest.mark.parametrize(
    ("answer", "phrases", "phase"),
    [
        ("I'm sorry, but I can't help with that.", (), "rolled_back"),
        ("I'm sorry, but I can't help with that.", ("nope",), "judging"),
        ("Nope.", ("nope",), "rolled_back"),
        ("Here is more than you want.", (), "judging"),
    ],
)
def test_a_candidate_that_refuses_everything_is_rolled_back(
    store: Redis, answer: str, phrases: tuple[str, ...], phase: str
) -> None:
    metrics = {"refused": defaults()["refused"]}
    started(store, replace(PLAN, min_samples=100, metrics=metrics, refusals=phrases))
    look(store)
    controller = Looks(store)
    for _ in range(4):
        answered(store, 5, answer)
        controller.look(state_of(store), UP)
    assert state_of(store).phase == phase
    assert state_of(store).reason.startswith("refused: answers that begin as a refusal") == (phase == "rolled_back")


def copied(store: Redis, count: int, task: str, copy: str) -> None:
    """Tasks and their copies have ended so."""
    row: dict[str, Any] = {
        "task": "t",
        "version": "a",
        "shadow": "b",
        "statuses": [task, copy],
        "reasons": [["stop"], ["stop"]],
    }
    row |= {"same": None, "ms": [1, 2], "engine_seconds": [None, None], "tokens": [9, 9]}
    for _ in range(count):
        store.xadd(keys.shadow_pairs("m"), {"row": json.dumps(row)})


def scored(store: Redis, count: int, *scores: float) -> None:
    """Outputs of the baseline are as likely: nats of a token, under baseline and candidate."""
    row = {"task": "t", "version": "a", "shadow": "b", "scored": 9, "scores": scores}
    for _ in range(count):
        store.xadd(keys.shadow_pairs("m"), {"row": json.dumps(row)})


@pytest.mark.parametrize(("copy", "phase"), [("failed", "rolled_back"), ("completed", "judging")])
def test_a_step_of_0_judges_by_copies_of_tasks_alone(store: Redis, copy: str, phase: str) -> None:
    plan = replace(PLAN, steps=(0.0, 10.0))
    with pytest.raises(RolloutError, match="models shadow m --to b"):
        started(store, plan)
    routes.set_shadow(store, "m", Shadow("b", 50))
    assert "shadow" in started(store, plan).plan.metrics
    assert (look(store).phase, part(store)) == ("judging", ("a", None, "b"))
    scored(store, 5, -1.0, -1.1)
    copied(store, 15, "completed", copy)
    copied(store, 3, "cancelled", "failed")
    state = look(store)
    assert (state.phase, part(store)[1]) == (phase, None if copy == "failed" else 10.0)
    assert state.reason.startswith("shadow: copies (shadow traffic) that failed") == (copy == "failed")
    assert routes.current(store, "m").shadow == Shadow("b", 50), "it is the operator's"


def test_a_step_of_0_waits_until_outputs_were_scored_and_finds_fluent_garbage(store: Redis) -> None:
    """Its copies complete, as long and as fast as their tasks."""
    routes.set_shadow(store, "m", Shadow("b", 50))
    started(store, replace(PLAN, steps=(0.0, 10.0), min_samples=50))
    look(store)
    copied(store, 60, "completed", "completed")
    scored(store, 20, -1.0, -4.5)
    assert (look(store).phase, part(store)) == ("judging", ("a", None, "b"))
    assert report(store, state_of(store))["waits"].startswith(
        "for comparisons of copies by each of their metrics: 20 of"
    )
    scored(store, 30, -1.0, -4.5)
    state = look(store)
    assert (state.phase, state.step) == ("rolled_back", 0)
    assert state.reason.startswith("likelihood: ")


def test_copies_of_tasks_do_not_make_up_for_callers_tasks_that_were_not_compared(store: Redis) -> None:
    routes.set_shadow(store, "m", Shadow("b", 50))
    started(store)
    look(store)
    copied(store, 15, "completed", "completed")
    assert look(store).percent == 10.0
    ended(store, 6)
    assert look(store).percent == 50.0


def test_without_a_worker_it_stops_at_no_traffic_and_without_its_last_one_it_is_rolled_back(store: Redis) -> None:
    started(store, replace(PLAN, timeout_s=0.0))
    state = look(store, DOWN)
    assert (state.phase, state.traffic, part(store)) == ("failed", 0, ("a", None, None))
    assert re.search(r"ready workers of b after \d+ s: 0 of 1", state.reason)
    started(store)
    look(store)
    assert look(store, DOWN).reason == "no worker of b has been ready for 0 s"
    assert part(store) == ("a", None, None)


def test_candidates_that_no_autoscaler_starts_are_said_to_need_a_worker(store: Redis) -> None:
    state = started(store)
    assert start_trouble(store, state) == "", "one may notice it yet"
    early = replace(state, begun=state.begun - 60_000)
    assert start_trouble(store, early).startswith("no autoscaler has a pool of it: start them, by `penstock worker")
    store.hset(keys.SCALE_POOLS, "m@b", json.dumps({"at": state.begun / 1000 + 1, "trouble": "no room"}))
    assert start_trouble(store, early) == "no room"


async def test_a_rollout_whose_state_is_deleted_leaves_no_part_and_no_workers_behind(
    store: Redis, valkey_url: str
) -> None:
    started(store)
    state = look(store)
    routes.add_rule(store, "m", routing.Rule(ALIAS, tenant="t"))
    later = {**json.loads(state.to_json()), "of_a_later_release": 1}
    store.hset(keys.CANARIES, "m", json.dumps(later))
    async with AsyncClient(valkey_url) as client:
        controller = Controller(client, valkey_url)
        await controller.sweep()
        assert part(store) == ("a", 10.0, "b"), "a later release judges it"
        canaries.forget(store, "m")
        await controller.sweep()
        controller.close()
    record = rollouts.read(store, "m")
    assert (part(store), routes.current(store, "m").rules) == (("a", None, None), ())
    assert record is not None
    assert (record.phase, "was deleted" in record.reason) == ("failed", True)
    assert started(store).phase == "preparing", "the next one begins"


OPERATIONS: dict[str, tuple[Callable[[Redis], Any], tuple[str, tuple[str, float | None, str | None]], list[str]]] = {
    "start": (started, ("preparing", ("a", None, "b")), ["start"]),
    "raise": (look, ("judging", ("a", 10.0, "b")), ["start", "raise"]),
    "promote": (
        lambda store: operations.promote(store, "m", full=True),
        ("promoted", ("b", None, None)),
        ["start", "promote"],
    ),
    "abort": (lambda store: operations.abort(store, "m"), ("aborted", ("a", None, None)), ["start", "abort"]),
}


@pytest.mark.parametrize("before", [True, False], ids=["before", "after"])
@pytest.mark.parametrize("name", OPERATIONS)
def test_whoever_dies_at_any_command_the_next_look_finishes_what_was_decided_once(
    store: Redis, valkey_url: str, name: str, before: bool
) -> None:
    """The decision is there or it is not; if it is, all of it comes about."""
    operation, (phase, expected), decisions = OPERATIONS[name]
    undecided = 0
    for at in itertools.count(1):
        store.delete(keys.CANARIES, keys.CANARY_EVIDENCE, keys.canary_log("m"), keys.ROLLOUTS, keys.routing("m"))
        cards.publish(store, card("a"), {})
        if name != "start":
            started(store)
        with Dying.from_url(valkey_url) as dying:
            dying.remaining, dying.before = at, before
            try:
                operation(dying)
                break  # it needs fewer commands
            except LostConnection:
                pass
        if (after := canaries.read(store, "m")) is None or len(did(store)) < len(decisions):
            undecided += 1
            assert after is None or after.phase == "preparing"
            continue
        look(store, DOWN if phase == "preparing" else UP)
        assert (state_of(store).phase, part(store), did(store)) == (phase, expected, decisions)
        assert state_of(store).since
        record = rollouts.read(store, "m")
        assert record is not None
        assert record.phase == {"promoted": "draining", "aborted": "failed"}.get(phase, "starting")
    assert 0 < undecided < at - 1


def test_whoever_dies_while_it_ends_what_a_deleted_state_left_the_next_look_finishes(
    store: Redis, valkey_url: str
) -> None:
    """Else the record stays, and with it the candidate's workers."""
    for at in itertools.count(1):
        started(store)
        look(store)
        canaries.forget(store, "m")
        (record,) = rollouts.all_of(store)
        with Dying.from_url(valkey_url) as dying:
            dying.remaining, dying.before = at, False
            try:
                end_deleted(dying, record)
                break  # it needs fewer commands
            except LostConnection:
                pass
        (record,) = rollouts.all_of(store)
        if record.phase == "starting":
            end_deleted(store, record)
        (record,) = rollouts.all_of(store)
        assert (record.phase, part(store)) == ("failed", ("a", None, None))
    assert at > 5


def test_a_row_counts_once_whoever_dies_and_however_many_look_at_once(store: Redis, valkey_url: str) -> None:
    started(store, replace(PLAN, min_samples=10**6))
    look(store)
    ended(store, 7)
    state = state_of(store)
    with Dying.from_url(valkey_url) as dying:
        for at in range(1, 12):
            dying.remaining = at
            with suppress(LostConnection):
                Looks(dying).look(state, UP)
    threads = [threading.Thread(target=Looks(Redis.from_url(valkey_url)).look, args=(state, UP)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    evidence = Evidence.of(canaries.read_evidence(store, "m"), state)
    assert (evidence.candidate.tasks, evidence.baseline.tasks) == (7, 56)


def test_rows_that_are_read_again_after_an_error_are_compared_once(store: Redis, valkey_url: str) -> None:
    started(store, replace(PLAN, min_samples=10**6))
    look(store)
    ended(store, 1)
    rows: Any = store.xrange(keys.LEDGER)
    *baseline, candidate = [fields for _, fields in rows]
    store.delete(keys.LEDGER)
    for fields in baseline:
        store.xadd(keys.LEDGER, fields)
    with Dying.from_url(valkey_url) as dying:
        controller = Looks(dying)
        for at in itertools.count(1):
            dying.remaining = at
            try:
                controller.look(state_of(store), UP)
                break
            except LostConnection:
                pass
    assert at > 2
    controller._store = store
    for _ in range(2):
        store.xadd(keys.LEDGER, candidate)
    controller.look(state_of(store), UP)
    evidence = Evidence.of(canaries.read_evidence(store, "m"), state_of(store))
    assert (evidence.candidate.tasks, evidence.compared(0, copies=False)) == (2, 1), "the second finds none"


def test_a_controller_that_was_stopped_brings_nothing_back_that_an_operator_has_ended(store: Redis) -> None:
    started(store)
    stale = state_of(store).decided("judging", "as it was decided before it stopped", 0)
    assert canaries.change(store, state_of(store), stale, "raise", "controller")
    operations.abort(store, "m")
    assert act(store, stale).phase == "aborted"
    assert part(store) == ("a", None, None)


def test_a_change_of_its_part_by_others_pauses_it_and_resume_sets_it_again(store: Redis) -> None:
    started(store)
    look(store)
    with pytest.raises(routing.RoutingError, match="`penstock rollout abort m`"):
        routes.set_aliases(store, "m", {}, [ALIAS])
    routes.set_split(store, "m", {ALIAS: 90})
    assert (look(store).phase, part(store)) == ("paused", ("a", 90, "b")), "it does not fight"
    assert "in generation" in state_of(store).reason
    assert operations.resume(store, "m").phase == "judging"
    assert part(store) == ("a", 10.0, "b")
    routes.add_rule(store, "m", routing.Rule("b", tenant="acme"))
    assert look(store).phase == "judging", "what is not its part may be changed"


def test_one_that_is_paused_before_its_first_step_waits_and_then_prepares_again(store: Redis) -> None:
    started(store)
    routes.set_aliases(store, "m", {ALIAS: "a"})
    assert [look(store).phase for _ in range(2)] == ["paused", "paused"]
    assert operations.resume(store, "m").phase == "preparing"
    assert (look(store, DOWN).phase, part(store)) == ("preparing", ("a", None, "b"))
    assert (look(store).phase, part(store)) == ("judging", ("a", 10.0, "b"))


def test_one_that_may_not_become_the_default_is_not_promoted(store: Redis) -> None:
    started(store)
    routes.set_stages(store, "m", {"a": "approved"})
    routes.set_approval(store, "m", required=True)
    state = operations.promote(store, "m", full=True)
    assert (state.phase, part(store)) == ("aborted", ("a", None, None))
    assert state.reason.startswith("it could not become the default: b of m is not approved")


def test_what_others_lead_to_its_alias_does_not_keep_it_from_being_rolled_back(store: Redis) -> None:
    started(store)
    look(store)
    kept = routing.Rule("b", tenant="other")
    routes.set_rules(store, "m", [routing.Rule(ALIAS, tenant="acme"), kept])
    routes.set_shadow(store, "m", Shadow(ALIAS, 5))
    assert look(store).phase == "judging"
    ended(store, 20, status="failed", first="")
    assert (look(store).phase, part(store)) == ("rolled_back", ("a", None, None))
    state = routes.current(store, "m")
    assert (state.rules, state.shadow) == ((kept,), None)


@pytest.mark.parametrize(("default", "phase"), [("b", "promoted"), ("c", "aborted")])
def test_it_ends_where_somebody_else_changes_the_default(store: Redis, default: str, phase: str) -> None:
    cards.add_version(store, card("c"), {})
    started(store)
    look(store)
    routes.set_aliases(store, "m", {"default": default})
    assert (look(store).phase, part(store)) == (phase, (default, None, None))


def test_it_ends_where_its_model_is_removed(store: Redis) -> None:
    started(store)
    look(store)
    assert cards.remove(store, "m", text(store.hget(keys.MODELS, "m")), "a")
    assert look(store).phase == "aborted"
    assert not look(store).under_way


def test_another_rollout_is_refused_while_one_is_under_way_and_of_two_at_once_one_begins(store: Redis) -> None:
    answers: list[str] = []

    def begin() -> None:
        try:
            answers.append(started(store).id)
        except RolloutError as error:
            answers.append(str(error))

    threads = [threading.Thread(target=begin) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert did(store) == ["start"]
    with pytest.raises(RolloutError, match="rollout abort m"):
        started(store)
    operations.abort(store, "m")
    at = rollouts.now(store)
    assert rollouts.begin(store, Rollout("m", "", "b", "a", 1, at, at)).phase == "starting"
    with pytest.raises(RolloutError, match="rollout m --cancel"):
        started(store)


@pytest.mark.parametrize(
    ("to", "plan", "message"),
    [
        ("nothing", PLAN, "no alias or version of m; its versions are"),
        ("a", PLAN, "a is the default of m already"),
        ("b", replace(PLAN, steps=(5.0, 5.0)), "the steps are 5,5"),
        ("b", replace(PLAN, steps=(100.0,)), "the steps are 100"),
        ("b", replace(PLAN, steps=(1.0, float("nan"), 5.0)), "the steps are 1,nan,5"),
        (
            "b",
            replace(PLAN, metrics={"shadow": {"margin": 0.1, "tolerance": 0}}),
            "only shadow, likelihood, diverged are left",
        ),
        ("b", replace(PLAN, metrics=defaults() | {"diverged": usual("diverged")}), "diverged compares copies of tasks"),
        (
            "b",
            replace(PLAN, metrics=defaults() | {"likelihood": {"margin": 0.05, "tolerance": 0}}),
            "likelihood compares copies of tasks, and b gets none: `penstock models shadow m --to b",
        ),
        ("b", replace(PLAN, metrics={"speed": {"margin": 0.1, "tolerance": 0}}), "there is no metric 'speed'"),
        ("b", replace(PLAN, alpha=0.5), "alpha is 0.5"),
        ("c", PLAN, "version c lacks chat"),
        ("b", replace(PLAN, steps=(80.0,)), "others have 30% of the tasks of m"),
    ],
)
def test_what_makes_no_sense_is_refused_and_changes_nothing(store: Redis, to: str, plan: Plan, message: str) -> None:
    cards.add_version(store, {**card("c"), "capabilities": []}, {})
    routes.set_split(store, "m", {"c": 30})
    before = part(store)
    with pytest.raises(RolloutError, match=message):
        started(store, plan, to)
    assert (part(store), canaries.read(store, "m")) == (before, None)


def test_a_version_that_may_not_become_the_default_gets_no_part(store: Redis) -> None:
    routes.set_stages(store, "m", {"a": "approved"})
    routes.set_approval(store, "m", required=True)
    with pytest.raises(RolloutError, match=r"b of m is not approved.* `penstock models stage m b=approved` first"):
        started(store)
    routes.set_stages(store, "m", {"b": "archived"})
    with pytest.raises(RolloutError, match="b of m is archived, and gets no new tasks"):
        started(store)
    assert canaries.read(store, "m") is None
    routes.set_stages(store, "m", {"b": "approved"})
    assert started(store).phase == "preparing"
    with pytest.raises(routing.RoutingError, match=r"leads to b of m: .*`penstock rollout abort m`"):
        routes.set_stages(store, "m", {"b": "archived"})


async def test_the_sweepers_duty_needs_no_more_than_a_sweepers_rights(
    store: Redis, valkey_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.execute_command("ACL", "SETUSER", "sweeps", "reset", "on", ">pw", "-@all", *ROLES["sweeper"].rules().split())
    url = valkey_url.replace("://", "://sweeps:pw@")
    async with AsyncClient(url) as client:
        controller = Controller(client, url)
        assert await controller.sweep() == {}
        started(store, replace(PLAN, timeout_s=0.0))
        assert await controller.sweep() == {"rollouts_decided": 1}
        assert state_of(store).phase == "failed"
        started(store, PLAN)
        controller.look(state_of(store), UP)
        answered(store, 1, "It reads these.")
        ended(store, 20, status="failed")
        assert await controller.sweep() == {"rollouts_decided": 1}
        started(store, PLAN)
        operations.promote(store, "m")
        assert canaries.change(store, state_of(store), state_of(store).decided("promoted", "now"), "promote", "me")
        await controller.sweep()
        monkeypatch.setattr("producers.rollouts.controller.KNOWN_S", -60.0)
        await controller.sweep()
        controller.close()
    record = rollouts.read(store, "m")
    assert record is not None
    assert record.phase == "done", "an hour later"
    store.acl_deluser("sweeps")
    assert part(store) == ("b", None, None)


async def test_one_that_cannot_be_looked_at_keeps_no_other_from_being_judged(store: Redis, valkey_url: str) -> None:
    plan = replace(PLAN, timeout_s=0.0)
    for version in ("a", "b"):
        cards.add_version(store, {**card(version), "name": "l"}, {})
    cards.publish(store, {**card("a"), "name": "l"}, {})
    operations.start(store, "l", "b", plan)
    started(store, plan)
    store.delete(keys.canary_log("l"))
    store.set(keys.canary_log("l"), "no stream")
    async with AsyncClient(valkey_url) as client:
        controller = Controller(client, valkey_url)
        with pytest.raises(ResponseError, match="WRONGTYPE"):
            await controller.sweep()
        controller.close()
    assert state_of(store).phase == "failed"
