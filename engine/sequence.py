"""A sequence: one choice of a request while it lives, and what scheduling and speculation keep about it."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum
from typing import TYPE_CHECKING

from engine.request import Request, Tier

if TYPE_CHECKING:
    from engine.kv.table import Table
    from engine.logprobs import PromptScores
    from engine.output import OutputState

#: What a trial counts less with each draft after it: of one sequence the last sixteen matter, of all the last fifty.
_FADE = 0.94
FADE_OF_ALL = 0.98
#: The longest that a sequence for which nothing was guessed is planned ahead again, in tokens.
_LONGEST_REST = 32


@dataclass(slots=True, eq=False)
class Account:
    """One tenant in one tier."""

    tenant: str
    tier: int
    served: float
    held: int = 0
    """Sequences that wait or run on it."""


@dataclass(slots=True)
class Guessed:
    """How well the tokens of one sequence, or of all, were guessed lately."""

    right: float = 0.0
    """Draft tokens that were accepted, of late."""
    tried: float = 0.0
    """These, and the first of each draft that was not."""
    latest: int = 0
    """The turn of its latest draft (Speculation.begin)."""
    rest: int = 0
    """For so many steps the sequence need not wait for a draft, because there was none."""
    missed: int = 0
    """Times in a row that there was none."""
    barred: bool = False
    """Whether there is to be none any more."""
    fade: float = _FADE

    def take(self, drafted: int, accepted: int) -> None:
        """Enter a draft of so many tokens. What comes after the first wrong one was not tried."""
        self.right = self.right * self.fade + accepted
        self.tried = self.tried * self.fade + accepted + (accepted < drafted)
        self.missed = self.rest = 0

    def miss(self) -> None:
        """Nothing was guessed."""
        self.missed += 1
        self.rest = min(1 << min(self.missed, 6), _LONGEST_REST)

    def share(self, before: float, weight: float) -> float:
        """The chance that a token is accepted, where `before` was thought so with the `weight` of so many trials."""
        return (self.right + before * weight) / (self.tried + weight)


class Status(IntEnum):
    WAITING = 0
    RUNNING = 1
    FINISHED = 2


#: Stands in a sequence's tokens for one that is not known yet. No token id: it cannot be hashed.
UNKNOWN = -1


@dataclass(slots=True, eq=False)
class Sequence:
    """One choice of a request while it lives: the object that scheduler, plan and runner share.

    The K/V of tokens[:computed] are in the cache, as far as later queries see them, where `tables` say.
    """

    request: Request
    choice: int
    tokens: list[int]
    """Prompt and output."""
    prompt_len: int
    output: OutputState
    seed: int
    """Of the request: its own, or drawn when it was added."""
    serial: int
    """Order of creation; breaks ties of arrival."""
    queued_at: float
    """When it last began to wait."""
    slot: int = -1
    """Permanent row, 0 to max_num_seqs - 1, while running."""
    computed: int = 0
    pending: bool = False
    """The last of tokens is UNKNOWN: the step in flight samples it. Only while the step after that one is planned."""
    tables: list[Table] = field(default_factory=list)
    """One for each KV group while it runs, else none."""
    room: int = 0
    """Tokens up to which every table has a place."""
    status: Status = Status.WAITING
    waited: float = 0.0
    """Seconds of waiting that have ended; the present wait runs from queued_at."""
    effective_tier: int = Tier.BATCH
    """Tier less ageing, as of its last admission."""
    account: Account | None = None
    """Its tenant's, in the tier that it waits or runs in; none before its prompt is computed by another choice."""
    tag: float = 0.0
    """What its tenant had been served when it was first admitted in that tier: its place in the batch."""
    paid: int = 0
    """Tokens up to which its tenant was charged."""
    preempted: bool = False
    """Waiting because it was put out of the batch."""
    root: bytes = b""
    """Parent of the hash of its first block."""
    hashes: list[bytes] = field(default_factory=list)
    """Hashes of the full blocks of tokens, as far as they were needed."""
    registered: int = 0
    """Leading blocks of its tokens that have been offered to the prefix cache."""
    scores: PromptScores | None = None
    """Where the log probabilities of the prompt are wanted."""
    bad_words: tuple[tuple[int, ...], ...] = ()
    """The tokens of each way to write one of them."""
    guessed: Guessed | None = None
    """How well its tokens were guessed, where they are."""

    @property
    def reusable(self) -> int:
        """Leading tokens whose K/V may come from the prefix cache: those after them are computed for their logits."""
        if self.scores is None or self.scores.done:
            return len(self.tokens) - 1
        return len(self.scores.found) - 1
