"""Explains from its kept state why a pool has its number of workers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import datetime
from typing import Any, Final

from producers.store.fleet.scaling import Pin, is_fresh

#: What a kept state lacks, if it is of another release or makes no sense.
UNREADABLE: Final = "its kept state cannot be read; the autoscaler that leads writes a new one"
TIME: Final = "%Y-%m-%d %H:%M:%S"

State = dict[str, Any]

#: What reading a state raises that makes no sense.
ODD: Final = (KeyError, TypeError, ValueError, AttributeError, ArithmeticError, OSError)


def explained(pool: str, state: State | None, history: Sequence[State], now: float) -> list[str]:
    """Lines of text. `state`: None of a pool that is scaled no more. `history`: decisions that changed something, the
    newest first. `now`: the store's clock.
    """
    try:
        if state is None:
            return [f"{pool}: nobody scales it any more", *(f"  {line}" for line in _changes(history))]
        return [*_head(pool, state, now), *(f"  {line}" for line in (*_body(state, now), *_changes(history)))]
    except ODD:
        return [f"{pool}: {UNREADABLE}"]


def summary(pool: str, state: State, now: float) -> str:
    """A pool's state in one line."""
    try:
        ready = "?" if state["signals"] is None else state["signals"]["ready"]
        trouble = f"  {state['trouble']}" if state["trouble"] else ""
        return f"{pool}  wanted {state['wanted']}  ready {ready}  {state['reason']}{_age(state, now)}{trouble}"
    except ODD:
        return f"{pool}  {UNREADABLE}"


def _age(state: State, now: float) -> str:
    age = now - float(state["at"])
    if is_fresh(state["at"], now):
        return ""
    return f" (decided {age:.0f} s ago: no autoscaler that leads has this pool)"


def _head(pool: str, state: State, now: float) -> Iterator[str]:
    yield f"{pool}: {_workers(state['wanted'])} wanted{_age(state, now)}"


def _workers(number: int) -> str:
    return f"{number} worker" if number == 1 else f"{number} workers"


def _body(state: State, now: float) -> Iterator[str]:
    yield f"why        {state['reason']}"
    if (pin := Pin.of(state.get("pin"))) is not None:
        until = "until it is unpinned" if pin.until is None else f"for {max(0.0, pin.until - now):.0f} s more"
        yield f"pinned     at {pin.workers} by {pin.by} since {max(0.0, now - pin.at):.0f} s, {until}"
    if state["trouble"]:
        yield f"trouble    {state['trouble']}"
    signals, rules, memory = state["signals"], state["rules"], state["memory"]
    if signals is None:
        yield "seen       nothing: the store or the broker could not be read"
    else:
        yield f"seen       {_queued(signals)}, {signals['in_flight']} in flight; {_workers(signals['ready'])} ready"
        if signals["missing"]:
            yield f"missing    {', '.join(signals['missing'])}"
    if signals is not None and state["raw"]:
        yield from _formula(state["raw"], signals, rules)
    yield f"limits     {rules['min']} to {rules['max']}"
    yield f"cool-down  {_cool_down(rules, memory, now)}"
    yield f"actuator   {_actuator(state)}"
    if signals is not None and signals["profile"]["cold_start"]:
        yield f"cold start {_phases(signals['profile']['cold_start'])}"
    yield f"decided    by {state['by']}, {max(0.0, now - state['at']):.0f} s ago"


def _queued(signals: State) -> str:
    waiting = [
        f"{tier['waiting']} {name} queued" + ("" if tier["oldest_s"] is None else f" (for {tier['oldest_s']:.0f} s)")
        for name, tier in signals["tiers"].items()
        if tier["waiting"]
    ]
    return ", ".join(waiting) or "nothing queued"


def _formula(raw: State, signals: State, rules: State) -> Iterator[str]:
    """The numbers, each with what it is made of; see `workers.autoscaler.policy`."""
    profile = signals["profile"]
    yield f"a = {raw['a']}      room: latency-sensitive tasks queued and in flight, over {_room(profile, rules)}"
    if profile["tokens_per_s"] and profile["tokens_per_task"]:
        speed = f"{profile['tokens_per_task']:.3g} tokens a task, {profile['tokens_per_s']:.3g} tokens/s a worker"
    else:
        speed = "tokens a task and tokens/s were never measured"
    yield f"b = {raw['b']}      wait: the queued tasks' tokens within their tiers' waits ({speed})"
    yield f"c = {raw['c']}      strain: {_strain(signals)}"
    if raw.get("d"):
        yield f"d = {raw['d']}      release: tasks that need a later one than that of some workers that are up"
    yield f"needed     {raw['raw']}: the largest of these, within the limits"


def _room(profile: State, rules: State) -> str:
    """The number of tasks that one worker is planned to hold, and what it is made of."""
    knee, wait = profile["knee"] or rules["default_knee"], rules["target_wait"]["priority"]
    quick = wait * (profile["tokens_per_s"] or 0.0) / profile["tokens_per_task"] if profile["tokens_per_task"] else 0.0
    if quick > rules["headroom"] * max(1.0, knee):
        return f"{quick:.3g} (what a worker does in priority's target wait, {wait:g} s)"
    return f"{rules['headroom']:g} of the knee ({knee:.3g}{'' if profile['knee'] else ', never measured'})"


def _strain(signals: State) -> str:
    ttft, duty = signals["profile"]["ttft_p95"], signals["profile"]["duty"]
    figures = (
        f"p95 of the first token {ttft:.3g} s" if ttft is not None else "",
        f"{signals['kv_used']:.0%} of the KV cache" if signals["kv_used"] is not None else "",
        f"computing {duty:.0%} of the time" if duty is not None else "",
    )
    return f"{signals['running']} running, " + (", ".join(filter(None, figures)) or "nothing measured")


def _cool_down(rules: State, memory: State | None, now: float) -> str:
    if memory is None or memory["changed_at"] is None:
        return f"{rules['cool_down']:g} s; the number has not changed yet"
    remaining = rules["cool_down"] - (now - memory["changed_at"])
    return f"{rules['cool_down']:g} s, " + (f"{remaining:.0f} s left" if remaining > 0 else "over")


def _actuator(state: State) -> str:
    if not state["actuator"]:
        return "none: another program follows penstock_desired_workers"
    if state["actual"] is None:
        return f"{state['actuator']}, which has not answered yet"
    return f"{state['actuator']}: told {state['told']}, {state['actual']['up']} up"


def _phases(start: dict[str, float]) -> str:
    phases = ", ".join(f"{name} {seconds:.2f}" for name, seconds in start.items() if name != "total")
    total = start.get("total")
    return f"{phases} s" if total is None else f"{total:.2f} s" + (f" ({phases})" if phases else "")


def _changes(history: Sequence[State]) -> Iterator[str]:
    if history:
        yield "last changes, the newest first:"
    for state in history:
        if {"at", "wanted", "reason"} <= state.keys():
            at = datetime.fromtimestamp(float(state["at"])).astimezone().strftime(TIME)
            trouble = f"; {state['trouble']}" if state.get("trouble") else ""
            yield f"  {at}  {state['wanted']}  {state['reason']}{trouble}"
