"""Speculative decoding: proposes draft tokens cheaply, computes them in one step, and keeps them as far as they are
right.

plan: pace picks the draft length of each decoding sequence, within the limits of balance; rows get a `max_draft`
propose: lookup finds what followed the same words before; draft runs a smaller model; rows get a `draft`
execute: the target model computes last token and draft in one go, and its own sampler samples after each of them
accept: a draft token is kept if and only if it equals the token sampled in its place (plan.accepted), so the output is
       the same as with one token a step; the sequence's Guessed counts accepted tokens, times measures steps
"""

from engine.speculate.lookup import Lookup
from engine.speculate.pace import Pace
from engine.speculate.speculation import Proposer, Speculation

__all__ = ["Lookup", "Pace", "Proposer", "Speculation"]
