"""Operators' actions on rollouts that judge: start, pause, resume, promote, abort.

Each is a change of the state, with its row, that any process may then act on: the operator's does at once, so none of
them needs a sweeper; what goes on by itself does (`producers.rollouts.controller`).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from redis import Redis

from producers.admin import routes
from producers.connection.script import text
from producers.contract import keys
from producers.rollouts import refusals
from producers.rollouts.controller import Decision, act, decide, next_step, routed
from producers.rollouts.metrics import BY_NAME, OF_COPIES, defaults, usual
from producers.store.access.audit import operator
from producers.store.fleet import canaries, cards, rollouts, routing
from producers.store.fleet.canaries import ALIAS, Canary, Plan
from producers.store.fleet.rollouts import Rollout

#: Most steps of a rollout.
MOST_STEPS = 20


class RolloutError(ValueError):
    """A rollout that makes no sense, or is not in a state for this; the message says what to do."""


def checked(plan: Plan) -> Plan:
    """The plan, with all metrics' settings and without a last step of 100. Raises RolloutError."""
    steps = plan.steps[:-1] if plan.steps and plan.steps[-1] == 100 else plan.steps
    rising = list(steps) == sorted(set(steps)) and all(0 <= step < 100 for step in steps)
    if not 1 <= len(steps) <= MOST_STEPS or not rising:
        raise RolloutError(
            f"the steps are {','.join(f'{step:g}' for step in plan.steps)}: they are 1 to {MOST_STEPS} rising "
            "percentages below 100; a last one of 100 stands for the promotion"
        )
    if not 0 < plan.alpha <= 0.2:
        raise RolloutError(f"alpha is {plan.alpha:g}: it is above 0 and at most 0.2")
    if unknown := plan.metrics.keys() - BY_NAME.keys():
        raise RolloutError(f"there is no metric {sorted(unknown)[0]!r}; there are {', '.join(BY_NAME)}")
    metrics = plan.metrics or defaults()
    for name, values in metrics.items():
        if not 0 <= values["margin"] < 1 or not 0 <= values["tolerance"] <= 10:
            raise RolloutError(f"{name}: a margin is a share from 0 to below 1, a tolerance a part from 0 to 10")
    try:
        phrases = refusals.checked(plan.refusals)
    except ValueError as error:
        raise RolloutError(str(error)) from None
    return replace(plan, steps=tuple(steps), metrics=metrics, refusals=phrases)


def start(store: Redis, model: str, to: str, plan: Plan, reference: str = "", by: str | None = None) -> Canary:
    """Begin a rollout. `to`: a version or an alias. Raises RolloutError, and RoutingError; redis errors.

    `reference`: NAME=FOLDER, for `penstock up`. `by`: unset, the user of this process; so for all that follow.
    """
    plan = checked(plan)
    current = routes.current(store, model)
    version = current.version_at(to)
    card = cards.of_version(store, model, version)
    if card is None:
        versions = ", ".join(cards.versions_of(store.hgetall(keys.VERSIONS), model)) or "none"
        raise RolloutError(
            f"{to!r} is no alias or version of {model}; its versions are {versions}; `penstock models publish FOLDER "
            f"--as {model}@candidate` adds one"
        )
    if version == current.default:
        raise RolloutError(f"{version} is the default of {model} already")
    stage = current.stage(version)
    if stage == "archived" or (current.approval and stage != "approved"):
        demanded = "gets no new tasks" if stage == "archived" else f"{model} demands approval before traffic"
        better = "approved" if current.approval else "staging"
        raise RolloutError(
            f"{version} of {model} is {stage if stage == 'archived' else f'not approved (its stage is {stage})'}, and "
            f"{demanded}: roll another version out, or `penstock models stage {model} {version}={better}` first"
        )
    _check(card, cards.read(store, model) or {}, version)
    shadow = current.copied_to()
    if shadow is None or shadow.to != version:
        if not plan.steps[0]:
            raise RolloutError(
                f"a step of 0 compares copies of tasks: `penstock models shadow {model} --to {to} --percent 10` makes "
                "some"
            )
        kept = {name: values for name, values in plan.metrics.items() if name not in OF_COPIES}
        if not kept:
            raise RolloutError(
                f"only {', '.join(OF_COPIES)} are left to compare, and {to} gets no copies of tasks: leave out less"
            )
        for name in plan.metrics.keys() - kept.keys():
            if not BY_NAME[name].usual or plan.metrics[name] != usual(name):
                raise RolloutError(
                    f"{name} compares copies of tasks, and {to} gets none: `penstock models shadow {model} --to {to} "
                    f"--percent 10` makes some; or leave {name} as it is"
                )
        plan = replace(plan, metrics=kept)
    others = {target: percent for target, percent in current.split.items() if target != ALIAS}
    if sum(others.values()) + plan.steps[-1] > 100:
        raise RolloutError(
            f"others have {sum(others.values()):g}% of the tasks of {model}: end that split, or give steps that "
            "leave them their part"
        )
    short = rollouts.read(store, model)
    raw: Any = store.hget(keys.CANARIES, model)
    last = Canary.of(raw)
    if last is not None and last.under_way:
        raise RolloutError(
            f"a rollout of {model} to {last.version} is {last.phase}, at {last.percent:g}%: let it end, or run "
            f"`penstock rollout abort {model}`"
        )
    if short is not None and short.phase == "starting":
        raise RolloutError(
            f"a rollout of {model} to version {short.version} is under way: let it end, or run "
            f"`penstock rollout {model} --cancel`"
        )
    if ALIAS in current.aliases:
        raise RolloutError(
            f"{model} has an alias {ALIAS!r}, which is kept for rollouts: `penstock models alias {model} --rm {ALIAS}`"
        )
    now, by = canaries.now_ms(store), by or operator()
    new = Canary(model, f"{now:x}", version, current.default, plan, now, by, reference, reason="it was started")
    for later in (new.decided("judging", "", len(plan.steps) - 1), new.decided("promoted", "")):
        routing.checked(routed(current, later))  # such as stages, which may forbid it
    if not canaries.begin(store, new, text(raw or ""), by):
        raise RolloutError(
            f"somebody else started a rollout of {model} at the same time: see `penstock rollout status`"
        )
    return act(store, new)


def pause(store: Redis, model: str, by: str | None = None) -> Canary:
    """Let it stay at its step. It is still rolled back if it turns out worse. Raises as `start`."""
    decision = Decision("pause", "paused", "an operator paused it")
    return _changed(store, model, ("judging",), lambda state: decision, by)


def resume(store: Redis, model: str, by: str | None = None) -> Canary:
    """Go on with a paused rollout. Raises as `start`."""

    def decided(state: Canary) -> Decision:
        return Decision("resume", "preparing" if state.step < 0 else "judging", "an operator resumed it")

    return _changed(store, model, ("paused",), decided, by)


def promote(store: Redis, model: str, by: str | None = None, *, full: bool = False) -> Canary:
    """Go to the next step now; `full`: make the candidate the default now. Raises as `start`."""

    def decided(state: Canary) -> Decision:
        why = "an operator promoted it"
        return Decision("promote", "promoted", why) if full else next_step(state, why)

    return _changed(store, model, canaries.UNDER_WAY, decided, by)


def abort(store: Redis, model: str, by: str | None = None) -> Canary:
    """End it: the baseline gets all tasks again, at once. Raises as `start`."""
    decision = Decision("abort", "aborted", "an operator aborted it")
    return _changed(store, model, canaries.UNDER_WAY, lambda state: decision, by)


def cancel(store: Redis, model: str) -> Rollout:
    """End a rollout without judgement that has not switched yet. Raises RolloutError without one; redis errors."""
    while True:
        current, card = rollouts.read(store, model), cards.read(store, model)
        if current is None or current.phase not in rollouts.UNDER_WAY:
            raise RolloutError(
                f"no rollout of {model} is under way" + ("" if current is None else f": it is {current.phase}")
            )
        if current.phase == "draining" or (card is not None and card["version"] == current.version):
            raise RolloutError(
                f"new tasks of {model} go to version {current.version} already: roll back with "
                f"`penstock rollout {model}=FOLDER`, the folder of version {current.before}"
            )
        ended = current.to("cancelled", rollouts.now(store), "an operator cancelled it")
        if rollouts.change(store, current, ended):
            return ended


def _changed(store: Redis, model: str, phases: tuple[str, ...], decision: Any, by: str | None = None) -> Canary:
    while True:
        state = canaries.read(store, model)
        if state is None:
            raise RolloutError(f"{model} has no rollout: `penstock rollout start {model} --to VERSION` begins one")
        if not state.since:
            act(store, state)  # whoever decided it died, or is about to act
            continue
        if state.phase not in phases:
            hint = ""
            if state.phase == "promoted":
                hint = f": `penstock models alias {model} default={state.before}` moves new tasks back"
            raise RolloutError(
                f"the rollout of {model} is {state.phase}; this needs one that is {' or '.join(phases)}{hint}"
            )
        if (new := decide(store, state, decision(state), by or operator())) is not None:
            return act(store, new)


def _check(card: dict[str, Any], current: dict[str, Any], version: str) -> None:
    """Raises RolloutError for a candidate that would break requests of today."""
    missing = [name for name in current.get("capabilities", ()) if name not in card.get("capabilities", ())]
    if missing:
        raise RolloutError(
            f"version {version} lacks {', '.join(missing)}, which {current['version']} has: requests would fail"
        )
