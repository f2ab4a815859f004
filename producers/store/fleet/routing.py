"""Routing: which version of a model a new task goes to, where that is not simply the version of the model's card.

The hash `penstock:routing:<model>` has `now`, the state (JSON), `generation`, its number, and `at:<generation>`, the
last KEPT states. ROUTE changes it: from the generation that was looked at to the next one, together with the model's
card where the default changes, and appends the change to the audit log, all in one script. So of two people who change
it at once, one is told to look again, and nothing remains half done whoever dies.

| field of the state | what it holds |
| --- | --- |
| `generation` | from 1; each change makes the next one |
| `default` | the version of the model's card, to which tasks go that nothing else decides |
| `aliases` | alias -> version |
| `split` | target -> percent of the tasks; the default gets the rest |
| `ranges` | of `[target, end]`: which keys each target of the split, and the default, has; see below |
| `rules` | of `{"to": target, "tenant" or "tier" or "header": value}`; the first that fits goes before the split |
| `sticky` | `caller`: tasks with equal `sticky` go to the same target; `tenant`: those of a tenant do |
| `stages` | version -> its stage: `staging`, `approved`, `archived`; of any other `none` |
| `shadow` | `{"to": target, "percent": ...}`: what gets copies of a part of the tasks (`producers.store.shadows`) |
| `approval` | whether only approved versions may be the default, or the target of a split or rule |
| `at`, `by` | when (unix ms), and who |

A **target** is an alias or a version. What decides, in this order: the alias or version that the task names, as
`model@alias` or `model@version`; a rule; the split; the default.

The split is by ranges: a key's hash is a point from 0 to WHOLE, and goes to the target in whose range it lies. A change
of the split changes the ranges as little as can be: who gets less gives as much of its ranges away, who gets more takes
as much, and all else stays. So a change by 5 points moves 5% of the keys, with however many targets, and none between
targets whose parts stay. An earlier generation that is restored has its ranges again. Rendezvous hashing, which needs
no ranges, moves up to twice as many where a split has several targets, and no function of the percentages alone moves
the fewest for three or more.
A task without a key is drawn at random. CLAIM draws by the task's id for plain Celery messages, which their senders
address to the model alone.

Stages stand here, so that no change of a stage and of a target can pass each other. An archived version gets no new
task, also none that names it. Restoring an earlier generation leaves stages and `approval` as they are. A release
before this one drops both when it changes the routing.

`default` is what the card says. Releases before this one know the card alone, and all write it, so a model without a
routing needs none. A card that one of them changes keeps its generation, whose `default` is not looked at then.

    what a sender does        what happens to a change meanwhile
    reads routing and cards   it reads the routing first: at worst it has an old one with a new default
    ADMIT                     `rerouted`, where the generation is another and no longer leads to the task's version:
                              nothing is written, and the sender resolves again
    sends                     the record has its version; failover, retry and batch keep it
"""

from __future__ import annotations

import hashlib
import json
import random
import re
import time
import zlib
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from operator import itemgetter
from typing import Any, Final, Self

from redis import Redis

from producers.connection.script import Call, parsed, run, script, text
from producers.contract import keys
from producers.store.access.audit import KEPT as AUDIT_KEPT
from producers.store.access.audit import Change
from producers.store.protocol import PACKAGE

#: The alias of the version that the model's card has.
DEFAULT: Final = "default"
#: States of a model's routing that are kept.
KEPT: Final = 50
#: Most aliases, targets of a split, and rules of a model.
MOST: Final = 16
#: The end of the last range: percentages are kept to 1e-7.
WHOLE: Final = 10**9
#: Most ranges of a split; where changes would make more, all are laid out anew.
MOST_RANGES: Final = 256
#: Stages of a version, beside NO_STAGE, which is not written.
STAGES: Final = ("staging", "approved", "archived")
NO_STAGE: Final = "none"
#: Most versions of a model that have a stage.
MOST_STAGES: Final = 100
ALIAS: Final = re.compile(r"[A-Za-z][A-Za-z0-9._-]{0,63}")
STICKY: Final = ("caller", "tenant")
#: What a rule may look at.
RULED: Final = ("tenant", "tier", "header")


_END: Final = itemgetter(1)
NO_HEADERS: Final[Mapping[str, str]] = {}


class RoutingError(ValueError):
    """A routing that makes no sense; the message says what to do."""


class RoutingChanged(RoutingError):
    """The routing has another generation than the one that was looked at."""


@dataclass(frozen=True, slots=True)
class Selection:
    """Facts of a task that decide its version. `version`: the alias or version that it names; `sticky`: its key;
    `headers`: those of its request."""

    version: str | None = None
    sticky: str | None = None
    tenant: str | None = None
    tier: str = "default"
    headers: Mapping[str, str] = field(default_factory=lambda: NO_HEADERS)


#: A task that says nothing.
ANY: Final = Selection()


@dataclass(frozen=True, slots=True)
class Rule:
    """Sends tasks to a target: those of a tenant, of a tier, or whose request has a header (`Name: value`)."""

    to: str
    tenant: str | None = None
    tier: str | None = None
    header: str | None = None

    def fits(self, selection: Selection) -> bool:
        """Whether a task is sent by this rule."""
        if self.header is not None:
            name, _, value = self.header.partition(":")
            return selection.headers.get(name.strip().lower()) == value.strip()
        return self.tier == selection.tier if self.tenant is None else self.tenant == selection.tenant


@dataclass(frozen=True, slots=True)
class Shadow:
    """A target that gets copies of so many percent of the tasks."""

    to: str
    percent: float


@dataclass(frozen=True, slots=True)
class Routing:
    """The state of a model's routing; the module describes its fields."""

    model: str
    generation: int
    default: str
    aliases: Mapping[str, str] = field(default_factory=dict)
    split: Mapping[str, float] = field(default_factory=dict)
    rules: Sequence[Rule] = ()
    sticky: str = "caller"
    at: int = 0
    by: str = ""
    stages: Mapping[str, str] = field(default_factory=dict)
    approval: bool = False
    shadow: Shadow | None = None
    ranges: Sequence[tuple[str, int]] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "ranges", ranges_of(self.split, self.ranges))

    @classmethod
    def of(cls, model: str, raw: str | bytes | None) -> Self | None:
        """The routing of a stored state; None where there is none, or it cannot be read."""
        fields = parsed(raw)
        try:
            rules = tuple(Rule(**rule) for rule in fields["rules"])
            names = ("generation", "default", "aliases", "split", "sticky", "at", "by")
            later = {name: fields[name] for name in ("stages", "approval", "ranges") if name in fields}
            shadow = Shadow(**fields["shadow"]) if "shadow" in fields else None
            return cls(model, rules=rules, shadow=shadow, **{name: fields[name] for name in names}, **later)
        except (KeyError, TypeError, ValueError):
            return None

    def to_json(self) -> str:
        """The state as it is stored."""
        rules = [{name: value for name, value in asdict(rule).items() if value is not None} for rule in self.rules]
        state = asdict(replace(self, rules=())) | {"rules": rules}
        del state["model"]
        for name in ("stages", "approval", "shadow", "ranges"):
            if not state[name]:
                del state[name]
        return json.dumps(state)

    def changed(self, by: str, **fields: Any) -> Routing:
        """The next generation, with these fields."""
        return replace(self, generation=self.generation + 1, at=int(time.time() * 1000), by=by, **fields)

    def version_at(self, target: str) -> str:
        """The version of an alias; a version stands for itself."""
        return self.default if target == DEFAULT else self.aliases.get(target, target)

    def leads_to(self, version: str) -> bool:
        """Whether new tasks may go to a version that they do not name."""
        targets = (*self.split, *(rule.to for rule in self.rules), *self.aliases, DEFAULT)
        return any(self.version_at(target) == version for target in targets)

    def versions(self) -> set[str]:
        """All versions that it names."""
        targets = {*self.split, *(rule.to for rule in self.rules), *self.aliases, DEFAULT}
        targets |= set() if self.shadow is None else {self.shadow.to}
        return {self.version_at(target) for target in targets}

    def copied_to(self) -> Shadow | None:
        """The version that gets copies of tasks, and of how many percent; None if none does."""
        return None if self.shadow is None else replace(self.shadow, to=self.version_at(self.shadow.to))

    def stage(self, version: str) -> str:
        """The stage of a version."""
        return self.stages.get(version, NO_STAGE)

    def target(self, selection: Selection) -> str:
        """The target that a task goes to."""
        return self.route(selection)[0]

    def route(self, selection: Selection) -> tuple[str, bool]:
        """The target that a task goes to; and whether neither the task nor a rule decides that."""
        if selection.version is not None:
            return selection.version, False
        for rule in self.rules:
            if rule.fits(selection):
                return rule.to, False
        if not self.split:
            return DEFAULT, True
        return drawn(self.ranges, _key(selection, self.sticky)), True


def draw_of(selection: Selection, sticky: str) -> str:
    """What tells draws apart: 8 hexadecimal digits, the same for all tasks of a key; 1 for a task without one."""
    key = _key(selection, sticky)
    return "1" if key is None else f"{zlib.crc32(key.encode()):08x}"


def _key(selection: Selection, sticky: str) -> str | None:
    return selection.sticky if sticky == "caller" or not selection.tenant else f"tenant {selection.tenant}"


def drawn(ranges: Sequence[tuple[str, int]], key: str | None) -> str:
    """The target that a key goes to; without one a random one. Each submit calls it. `_routing.lua` says the same."""
    if key is None:
        point = random.random() * WHOLE  # noqa: S311 - nothing secret
    else:
        digest = hashlib.sha1(f"{key}\0split".encode(), usedforsecurity=False).digest()
        point = ((int.from_bytes(digest[:7]) >> 4) + 0.5) / 2**52 * WHOLE
    return ranges[bisect_right(ranges, point, key=_END)][0]


def ranges_of(split: Mapping[str, float], before: Sequence[tuple[str, int]] = ()) -> tuple[tuple[str, int], ...]:
    """The ranges of a split, each `(target, end)`, rising to WHOLE: those `before` it, changed as little as can be.

    No ranges without a split. Who gets less gives its smallest ranges first, so that they stay few.
    """
    if not split:
        return ()
    lacking, end, total = dict[str, int](), 0, 0.0
    for target, percent in split.items():
        if target == DEFAULT or not 0 < percent <= 100:
            continue  # `checked` refuses such a split
        begin, total = end, total + percent
        end = min(WHOLE, round(total * WHOLE / 100))
        lacking[target] = end - begin
    lacking[DEFAULT] = WHOLE - end
    pieces = _pieces(before)
    free = [0] * len(pieces)
    surplus = {target: -parts for target, parts in lacking.items()}
    for target, width in pieces:
        surplus[target] = surplus.get(target, 0) + width
    growing = {target for target, parts in surplus.items() if parts < 0}
    for index in sorted(range(len(pieces)), key=lambda index: pieces[index][1]):
        target, width = pieces[index]
        free[index] = max(0, min(width, surplus[target]))
        surplus[target] -= free[index]
        lacking[target] = lacking.get(target, 0) - (width - free[index])
    after: list[tuple[str, int]] = []
    for index, (target, width) in enumerate(pieces):
        freed = free[index]
        # What a target took of its neighbour it gives back first.
        behind = index > 0 and pieces[index - 1][0] in growing
        _append(after, target, 0 if behind else width - freed)
        while freed:
            last = after[-1][0] if after else ""
            taker = last if lacking.get(last, 0) > 0 else next(name for name, parts in lacking.items() if parts > 0)
            part = min(freed, lacking[taker])
            lacking[taker], freed = lacking[taker] - part, freed - part
            _append(after, taker, part)
        _append(after, target, width - free[index] if behind else 0)
    return tuple(after) if len(after) <= MOST_RANGES else ranges_of(split)


def _append(ranges: list[tuple[str, int]], target: str, width: int) -> None:
    end = width + (ranges[-1][1] if ranges else 0)
    if width and ranges and ranges[-1][0] == target:
        ranges[-1] = target, end
    elif width:
        ranges.append((target, end))


def _pieces(ranges: Sequence[tuple[str, int]]) -> list[tuple[str, int]]:
    """The targets of ranges with their widths; the whole for the default without any. Raises ValueError for ranges that
    do not rise to WHOLE."""
    ends = [0, *(end for _, end in ranges)] if ranges else [0, WHOLE]
    pieces = [(target, end - begin) for (target, end), begin in zip(ranges or [(DEFAULT, WHOLE)], ends, strict=False)]
    if ends[-1] != WHOLE or any(width <= 0 for _, width in pieces):
        raise ValueError("ranges of a split rise to the whole")
    return pieces


def checked(routing: Routing) -> Routing:
    """The routing, if it makes sense. Raises RoutingError."""
    for name in routing.aliases:
        if not ALIAS.fullmatch(name) or name == DEFAULT:
            raise RoutingError(
                f"{name!r} cannot be an alias: 1 to 64 letters, digits, '.', '_' and '-', the first one a letter"
            )
    for kind, entries in (
        ("aliases", routing.aliases),
        ("targets of a split", routing.split),
        ("rules", routing.rules),
    ):
        if len(entries) > MOST:
            raise RoutingError(f"{len(entries)} {kind}; a model has at most {MOST}")
    for target, percent in routing.split.items():
        if target == DEFAULT:
            raise RoutingError("the default gets what the others leave: name only the others' percentages")
        if not 0 < percent <= 100:
            raise RoutingError(f"{target} has {percent:g} percent; a part of a split is above 0, and at most 100")
    if (whole := sum(routing.split.values())) > 100 + 1e-9:
        raise RoutingError(f"the parts of the split are {whole:g} percent together; they are at most 100")
    if routing.shadow is not None and not 0 < routing.shadow.percent <= 100:
        raise RoutingError(f"{routing.shadow.percent:g} percent are copied; say more than 0, and at most 100")
    if routing.sticky not in STICKY:
        raise RoutingError(f"sticky is {routing.sticky!r}; it is {' or '.join(STICKY)}")
    for rule in routing.rules:
        if sum(map(bool, (rule.tenant, rule.tier, rule.header))) != 1:
            raise RoutingError(f"a rule looks at one of {', '.join(RULED)}")
        if rule.header is not None and not all(map(str.strip, rule.header.partition(":"))):
            raise RoutingError(f"a rule's header is {rule.header!r}; write it as `Name: value`")
    for stage in routing.stages.values():
        if stage not in STAGES:
            raise RoutingError(f"{stage!r} is no stage; stages are {', '.join((NO_STAGE, *STAGES))}")
    if len(routing.stages) > MOST_STAGES:
        raise RoutingError(
            f"{len(routing.stages)} versions of {routing.model} have a stage; at most {MOST_STAGES} may: give some "
            f"the stage {NO_STAGE}"
        )
    return staged(routing)


def leads(routing: Routing) -> dict[str, tuple[str, str]]:
    """Each target that the routing names -> what leads there, in words, and the command that ends it."""
    model, leading = routing.model, {}
    for name in routing.aliases:
        leading[name] = f"the alias {name!r}", f"penstock models alias {model} --rm {name}"
    if routing.shadow is not None:
        leading.setdefault(routing.shadow.to, ("its shadow", f"penstock models shadow {model} --off"))
    for rule in routing.rules:
        leading[rule.to] = "a rule", f"penstock models rule {model} --clear"
    for target in routing.split:
        leading[target] = "the split", f"penstock models split {model} --off"
    leading[DEFAULT] = "the default", f"penstock models alias {model} default=VERSION"
    return leading


def staged(routing: Routing) -> Routing:
    """The routing, if the stages of the versions that it leads to allow it. Raises RoutingError."""
    deciding = {DEFAULT, *routing.split, *(rule.to for rule in routing.rules)}
    for target, (source, _) in leads(routing).items():
        version = routing.version_at(target)
        stage = routing.stage(version)
        if stage == "archived":
            raise RoutingError(
                f"{version} of {routing.model} is archived, and {source} leads to it: let that lead elsewhere, or give "
                f"the version another stage (`penstock models stage {routing.model} {version}=staging`)"
            )
        if routing.approval and target in deciding and stage != "approved":
            raise RoutingError(
                f"{version} of {routing.model} is not approved (its stage is {stage}), and {source} leads to it: the "
                f"model demands approval before traffic (`penstock models stage {routing.model} {version}=approved`)"
            )
    return routing


def route(new: Routing, audit: Change | None, old_card: str = "", new_card: str = "") -> Call:
    """ROUTE: from the generation before to this routing, and from the model's card `old_card` to `new_card`. Answers 1;
    0 if somebody has changed either meanwhile."""
    arguments = (new.model, new.generation - 1, new.to_json(), old_card, new_card, KEPT)
    log = ("" if audit is None else audit.to_json(), AUDIT_KEPT, keys.AUDIT)
    return Call(script(PACKAGE, "route"), (keys.routing(new.model), keys.MODELS), (*arguments, *log))


def read(store: Redis, model: str) -> Routing | None:
    """A model's routing; None where its card alone decides. Raises redis.RedisError or OSError."""
    return Routing.of(model, store.hget(keys.routing(model), "now"))


def history(store: Redis, model: str) -> list[Routing]:
    """The last KEPT states of a model's routing, the latest first. Raises redis.RedisError or OSError."""
    raw: Mapping[Any, Any] = store.hgetall(keys.routing(model))
    states = (Routing.of(model, value) for name, value in raw.items() if text(name).startswith("at:"))
    return sorted((state for state in states if state is not None), key=lambda state: -state.generation)


def write(store: Redis, new: Routing, audit: Change, old_card: str = "", new_card: str = "") -> bool:
    """Perform `route`, and log the change. False if somebody has changed the routing, or the card, meanwhile."""
    if not run(store, route(new, audit, old_card, new_card)):
        return False
    audit.say()
    return True
