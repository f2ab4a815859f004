"""Speculative decoding: proposes draft tokens cheaply, computes them in one step, and keeps them as far as they are
right.

plan: policy picks the draft length of each decoding sequence; rows get a `max_draft`
propose: Lookup finds what followed the same words before; draft runs a smaller model; rows get a `draft`
execute: the target model computes last token and draft in one go, and its own sampler samples after each of them
accept: a draft token is kept if and only if it equals the token sampled in its place (plan.accepted), so the output is
       the same as with one token a step; policy learns how many were accepted, and how long the step took
"""

from engine.speculate.speculation import Lookup, Proposer, Speculation

__all__ = ["Lookup", "Proposer", "Speculation"]
