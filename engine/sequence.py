"""A sequence: one choice of a request, with its state for scheduling and speculation."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import IntEnum
from typing import TYPE_CHECKING

from engine.request import LoadedAdapter, Request, Tier

if TYPE_CHECKING:
    from engine.beams import Beam
    from engine.grammar.matcher import Matcher
    from engine.kv.table import Table
    from engine.output import OutputState
    from engine.request import PromptScores
    from engine.watermark import WatermarkKey

#: The most steps for which a sequence without a draft goes on without waiting for one.
_LONGEST_PAUSE = 32


@dataclass(slots=True, eq=False)
class Account:
    """The service account of one tenant in one tier."""

    tenant: str
    tier: int
    served: float
    open_requests: int = 0
    """The number of sequences that wait or run on this account."""


@dataclass(slots=True)
class Guessed:
    """Speculation's knowledge of a sequence."""

    share: float | None = None
    """The estimated probability that a draft token is accepted if those before it are. None before the first draft."""
    latest: float = -math.inf
    """The turn of the latest draft."""
    pause: int = 0
    """The number of steps for which the sequence need not wait for a draft, because the last attempt gave none."""
    missed: int = 0
    """The number of attempts in a row that gave no draft."""
    barred: bool = False
    """Whether the sequence gets no more drafts."""

    def miss(self) -> None:
        """Count an attempt that gave no draft."""
        self.missed += 1
        self.pause = min(2**self.missed, _LONGEST_PAUSE)


class Status(IntEnum):
    WAITING = 0
    RUNNING = 1
    FINISHED = 2


#: Placeholder in a sequence's tokens for a token that is not known yet. It is no token id and cannot be hashed.
UNKNOWN = -1


@dataclass(slots=True, eq=False)
class Sequence:
    """One choice of a request, from its queueing to its end: shared by scheduler, plan and runner.

    The KV blocks in `tables` hold the K/V of tokens[:computed], as far back as later queries see.
    """

    request: Request
    choice: int
    tokens: list[int]
    """The token ids of prompt and output."""
    prompt_len: int
    output: OutputState
    seed: int
    """The request's seed: its own, or one drawn when the request was added."""
    serial: int
    """The order of creation, which breaks ties of arrival."""
    queued_at: float
    """The time at which the sequence last began to wait, in monotonic seconds."""
    slot: int = -1
    """The sequence's permanent row while it runs, from 0 to max_num_seqs - 1."""
    computed: int = 0
    computed_before: int = 0
    """The number of leading tokens that were computed before its last preemption, or by an earlier worker."""
    pending: bool = False
    """Whether the last token is UNKNOWN because the step in flight samples it. True only while the next step is
    planned."""
    tables: list[Table] = field(default_factory=list)
    """One block table for each KV group while the sequence runs, else empty."""
    allocated: int = 0
    """The number of leading tokens for which every table has a block."""
    status: Status = Status.WAITING
    waited: float = 0.0
    """Seconds of earlier waits. The present wait counts from queued_at."""
    effective_tier: int = Tier.BATCH
    """The tier less ageing, as of the last admission."""
    account: Account | None = None
    """The tenant's account in the tier in which the sequence waits or runs. None while another choice prefills."""
    tag: float = 0.0
    """The tokens by weight served to its tenant when it was first admitted in that tier. It orders the batch."""
    paid: int = 0
    """The number of leading tokens for which the tenant was charged."""
    preempted: bool = False
    """Whether the sequence waits because it was preempted."""
    root: bytes = b""
    """The parent of the first block's hash."""
    hashes: list[bytes] = field(default_factory=list)
    """The hashes of the full blocks of tokens, as far as they were needed."""
    registered: int = 0
    """The number of leading blocks that were offered to the prefix cache."""
    scores: PromptScores | None = None
    """The log probabilities of the prompt, if the request wants them."""
    bad_words: tuple[tuple[int, ...], ...] = ()
    """The token ids of each way to write each bad word."""
    matcher: Matcher | None = None
    """Follows the output, if it is to have a form."""
    watermark: WatermarkKey | None = None
    """The key by which its tokens are marked, if they are."""
    beam: Beam | None = None
    """Its state as a beam of a search, if it is one."""
    adapter: LoadedAdapter | None = None
    """The adapter of the model that computes it. None: the model itself."""
    plain: bool = False
    """Whether its decodes only need the text of their tokens: it has no form, no candidates of best_of, no scores of
    its prompt, no drafts and no rope switch."""
    guessed: Guessed = field(default_factory=Guessed)
    """The acceptance of its draft tokens, if there were any."""

    @property
    def idle(self) -> bool:
        """Whether it is a beam that waits for the others of its search, with nothing to compute."""
        return self.beam is not None and self.beam.continuations is not None

    @property
    def parked(self) -> bool:
        """Whether it is such a beam and gave up its slot and blocks: it is in no queue."""
        return self.idle and self.status is Status.WAITING

    @property
    def reusable(self) -> int:
        """The number of leading tokens whose K/V may come from the prefix cache. The others are computed for their
        logits."""
        if self.scores is None or self.scores.done:
            return len(self.tokens) - 1
        return len(self.scores.entries) - 1
