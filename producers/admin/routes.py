"""Changes of a model's routing (`producers.store.fleet.routing`), as an operator asks for them.

Each change reads the routing, the model's card and its versions' cards, and writes the next generation by ROUTE; where
somebody else was faster it looks again. A model's first change also publishes its card, so that no worker that starts
takes the default over.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from redis import Redis

from producers.client.directory import encoding_of_card
from producers.connection.script import parsed, run, text
from producers.contract import keys
from producers.store.access.audit import Change, operator
from producers.store.fleet import canaries, cards, rollouts, routing
from producers.store.fleet.cards import profile_field
from producers.store.fleet.routing import DEFAULT, NO_STAGE, Routing, RoutingChanged, RoutingError, Rule, Shadow
from producers.store.protocol import swap

#: Stages of versions that are kept though nothing leads to them.
PINNED: Final = ("staging", "approved")


def current(store: Redis, model: str) -> Routing:
    """A model's routing; one of generation 0 where its card alone decides. Raises RoutingError without such a model;
    redis errors."""
    card = cards.read(store, model)
    if card is None:
        names = ", ".join(sorted(map(text, store.hkeys(keys.MODELS)))) or "none"
        raise RoutingError(f"there is no model {model!r}; there are {names}")
    current_routing = routing.read(store, model) or Routing(model, 0, "")
    return replace(current_routing, default=card["version"])


def set_aliases(
    store: Redis, model: str, aliases: Mapping[str, str], removed: Sequence[str] = (), generation: int | None = None
) -> Routing:
    """Let aliases name versions: `default` is where tasks go that nothing else decides. Raises as `current`, also for a
    version that nobody announced or published, for an alias that is in use and `removed`, and, as RoutingChanged, where
    the routing has another `generation`."""

    def change(before: Routing) -> Routing:
        missing = [name for name in removed if name not in before.aliases]
        if missing:
            raise RoutingError(f"{model} has no alias {missing[0]!r}")
        leading = routing.leads(replace(before, aliases={}))
        for name in removed:
            if name in leading:
                source, end = leading[name]
                state = canaries.read(store, model) if name == canaries.ALIAS else None
                end = f"penstock rollout abort {model}" if state is not None and state.under_way else end
                raise RoutingError(f"{source} of {model} leads to the alias {name!r}: end that first (`{end}`)")
        versions = {name: before.version_at(version) for name, version in aliases.items()}
        kept = {name: version for name, version in before.aliases.items() if name not in removed}
        default = versions.pop(DEFAULT, before.default)
        return replace(before, default=default, aliases={**kept, **versions})

    summary = ", ".join(
        [*(f"{name}={version}" for name, version in aliases.items()), *(f"-{name}" for name in removed)]
    )
    return update(store, model, summary, change, generation=generation)


def set_split(
    store: Redis,
    model: str,
    split: Mapping[str, float] | None,
    sticky: str | None = None,
    generation: int | None = None,
) -> Routing:
    """Give targets parts of the tasks, in percent; the default gets the rest. None leaves them, and leaves `sticky`.
    Raises as `set_aliases`."""
    summary = [] if split is None else [", ".join(f"{to} {percent:g}%" for to, percent in split.items()) or "none"]
    summary += [] if sticky is None else [f"sticky {sticky}"]

    def change(before: Routing) -> Routing:
        return replace(before, split=before.split if split is None else split, sticky=sticky or before.sticky)

    return update(store, model, f"split {', '.join(summary)}", change, generation=generation)


def set_rules(store: Redis, model: str, rules: Sequence[Rule], generation: int | None = None) -> Routing:
    """Replace the rules. Raises as `set_aliases`."""
    new = tuple(rules)
    return update(store, model, f"{len(new)} rules", lambda before: replace(before, rules=new), generation=generation)


def add_rule(store: Redis, model: str, rule: Rule, generation: int | None = None) -> Routing:
    """Add a rule behind the others. Raises as `set_aliases`."""
    added = f"rule to {rule.to}"
    return update(
        store, model, added, lambda before: replace(before, rules=(*before.rules, rule)), generation=generation
    )


def set_stages(store: Redis, model: str, stages: Mapping[str, str], reason: str = "") -> Routing:
    """Give versions, or what aliases name, stages. `reason`: for the audit log. Raises as `set_aliases`, also where the
    routing leads to a version in a way that its new stage does not allow."""

    def change(before: Routing) -> Routing:
        new = {before.version_at(target): stage for target, stage in stages.items()}
        versions = {before.default, *cards.versions_of(store.hgetall(keys.VERSIONS), model)}
        for version in new:
            if version not in versions and version not in before.stages:
                raise RoutingError(unknown_version(store, model, version))
        kept = {version: stage for version, stage in before.stages.items() if version in versions}
        after = {version: stage for version, stage in {**kept, **new}.items() if stage != NO_STAGE}
        for target, (source, end) in routing.leads(before).items():
            if new.get(version := before.version_at(target)) == "archived":
                end = f"penstock rollout abort {model}" if target == canaries.ALIAS else end
                raise RoutingError(f"{source} leads to {version} of {model}: end that first (`{end}`), then archive it")
        return replace(before, stages=after)

    summary = ", ".join(f"{version} {stage}" for version, stage in stages.items())
    return update(store, model, summary + (f": {reason}" if reason else ""), change, "model.stage")


def set_approval(store: Redis, model: str, *, required: bool) -> Routing:
    """Let the default, the split and rules lead to approved versions alone, or to any. Raises as `set_aliases`, also
    where one of them leads to a version that is not approved."""
    summary = f"approval {'required' if required else 'not required'}"
    return update(store, model, summary, lambda before: replace(before, approval=required), "model.policy")


def set_shadow(store: Redis, model: str, shadow: Shadow | None) -> Routing:
    """Copy a part of the tasks to a version (`producers.store.shadows`), or to none. Raises as `set_aliases`, also for
    a version whose token ids mean other texts than those of the default."""

    def change(before: Routing) -> Routing:
        after = replace(before, shadow=shadow)
        if shadow is not None:
            default, other = (cards.of_version(store, model, before.version_at(to)) for to in (DEFAULT, shadow.to))
            if default and other and encoding_of_card(default) != encoding_of_card(other):
                raise RoutingError(
                    f"{shadow.to} of {model} has another tokenizer or chat template than the default: outputs are "
                    "compared token by token, so that nothing could be compared"
                )
        return after

    summary = "shadow off" if shadow is None else f"shadow to {shadow.to}, {shadow.percent:g}%"
    return update(store, model, summary, change)


def uses(store: Redis, model: str) -> dict[str, list[str]]:
    """The model's versions that are in use -> what uses each, in words. Raises redis.RedisError or OSError."""
    before = routing.read(store, model) or Routing(model, 0, "")
    card = cards.read(store, model)
    state = replace(before, default=card["version"] if card is not None else before.default)
    uses: dict[str, list[str]] = {}

    def add(version: str, use: str) -> None:
        if version:
            uses.setdefault(version, []).append(use)

    add(state.default, "it is the default")
    for alias in state.aliases:
        add(state.version_at(alias), f"the alias {alias!r} leads to it")
    for target in state.split:
        add(state.version_at(target), "the split leads to it")
    for rule in state.rules:
        add(state.version_at(rule.to), "a rule leads to it")
    if (shadow := state.copied_to()) is not None:
        add(shadow.to, "it gets copies of tasks")
    for version, stage in state.stages.items():
        if stage in PINNED:
            add(version, f"it is {stage}")
    for raw in store.hvals(keys.POOLS):
        pool = parsed(raw)
        if pool.get("model") == model:
            unserved = pool.get("fingerprint") == keys.UNSERVED
            use = "tasks may wait for it (a sweeper looks)" if unserved else "workers serve it, or did lately"
            add(str(pool.get("version")), use)
    rollout, canary = rollouts.read(store, model), canaries.read(store, model)
    if rollout is not None and rollout.phase in rollouts.UNDER_WAY:
        add(rollout.before, "a rollout is under way")
        add(rollout.version, "a rollout is under way")
    if canary is not None and canary.under_way:
        add(canary.before, "a rollout is under way")
        add(canary.version, "a rollout is under way")
    return uses


def remove_version(store: Redis, model: str, version: str) -> None:
    """Forget a version. Raises RoutingError for one that is in use, or is not known; redis errors."""
    field = profile_field(model, version)
    raw: Any = store.hget(keys.VERSIONS, field)
    if raw is None:
        raise RoutingError(unknown_version(store, model, version))
    if using := uses(store, model).get(version):
        raise RoutingError(f"{version} of {model} is in use: {'; '.join(dict.fromkeys(using))}")
    change = Change(operator(), "model.remove", field)
    if run(store, swap(keys.VERSIONS, field, text(raw), "", audit=change)):
        change.say()
    if uses(store, model).get(version):  # somebody let something lead to it meanwhile
        run(store, swap(keys.VERSIONS, field, "", text(raw)))
        raise RoutingError(f"{version} of {model} has just come into use; it is kept")


def models_of(store: Redis) -> set[str]:
    """The names of all models that the store knows. Raises redis.RedisError or OSError."""
    names = {text(field).rpartition("@")[0] for field in store.hkeys(keys.VERSIONS)}
    return names | set(map(text, store.hkeys(keys.MODELS)))  # an earlier release wrote no card of a version


def unused_versions(store: Redis) -> list[tuple[str, str]]:
    """(model, version) of all versions that nothing uses. Raises redis.RedisError or OSError."""
    fields = [text(field).rpartition("@") for field in store.hkeys(keys.VERSIONS)]
    used = {model: uses(store, model) for model in {model for model, _, _ in fields}}
    return sorted((model, version) for model, _, version in fields if version not in used[model])


def restore(store: Redis, model: str, generation: int) -> Routing:
    """Go back to what an earlier generation said, in a new one. Raises as `set_aliases`, also for a generation that is
    not kept."""

    def change(before: Routing) -> Routing:
        states = {state.generation: state for state in routing.history(store, model)}
        if generation not in states:
            kept = ", ".join(map(str, sorted(states))) or "none"
            raise RoutingError(f"generation {generation} of {model} is not kept; kept are {kept}")
        state = states[generation]
        return replace(state, generation=before.generation, stages=before.stages, approval=before.approval)

    return update(store, model, f"as of generation {generation}", change)


def update(
    store: Redis,
    model: str,
    summary: str,
    change_of: Callable[[Routing], Routing],
    did: str = "model.route",
    by: str | None = None,
    generation: int | None = None,
) -> Routing:
    """Write the next generation of a model's routing; nothing where `change_of` changes nothing.

    `summary`, `did`: the change, for the audit log; `by`: unset, the user of this process. `generation`: the one that
    was looked at; None: whichever it is. Raises as `set_aliases`, and what `change_of` raises.
    """
    by = by or operator()
    audit = Change(by, did, f"{model}: {summary}"[:500])
    while True:
        before = current(store, model)
        if generation not in (None, before.generation):
            who = f", by {before.by}" if before.by else ""
            raise RoutingChanged(
                f"the routing of {model} has generation {before.generation}{who}, and not {generation}: look at it "
                f"again (`penstock models routing {model} --history`)"
            )
        raw: Any = store.hget(keys.MODELS, model)
        card = parsed(raw)
        if card.get("version") != before.default:
            continue  # it has just changed
        after = routing.checked(change_of(before))
        _check_targets(store, after)
        if after == before:
            return before
        new = after.changed(by)
        cards.keep_card(store, card)
        new_card = _default_card(store, card, new)
        for version in new.versions():
            cards.keep_known(store, model, version)
        old_card = "" if new_card is None else text(raw)
        if routing.write(store, new, audit, old_card, "" if new_card is None else json.dumps(new_card)):
            return new


def _check_targets(store: Redis, new: Routing) -> None:
    """Raise RoutingError for a target that is no version with a card, and for an alias that is one."""
    for alias in new.aliases:
        if cards.of_version(store, new.model, alias) is not None:
            raise RoutingError(f"{alias!r} is a version of {new.model}: call the alias otherwise")
    for version in sorted(new.versions()):
        if cards.of_version(store, new.model, version) is None:
            raise RoutingError(unknown_version(store, new.model, version))


def unknown_version(store: Redis, model: str, version: str) -> str:
    """Why a version or alias cannot be named, and what to do."""
    versions = ", ".join(cards.versions_of(store.hgetall(keys.VERSIONS), model)) or "none"
    return (
        f"{version!r} is no alias of {model}, and no version of it that is known here: a worker announces its version, "
        f"and `penstock models publish FOLDER --as {model}@ALIAS` adds one; known are {versions}"
    )


def _default_card(store: Redis, card: dict[str, Any], new: Routing) -> dict[str, Any] | None:
    """The model's card with the new default; None if the card may stay. It is published, so that no worker that starts
    replaces it."""
    if card["version"] == new.default and "published" in card:
        return None
    version = card if card["version"] == new.default else cards.of_version(store, new.model, new.default)
    assert version is not None, "targets were checked"
    return cards.published(store, {**version, "name": new.model}, card)
