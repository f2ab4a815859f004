"""Several tokens of a sequence in one step: guessed cheaply, computed together, kept as far as they are right.

plan: how long a draft each decoding sequence may have (pace.py, within what balance.py allows), and blocks -> `room`
propose: lookup.py finds what followed the same words before; draft.py asks a smaller model; rows get a `draft`
execute: the target computes last token and draft in one go, and its own sampler chooses after each of them
accept: a draft token is kept if and only if it is what was chosen in its place (plan.accepted), so that the output
is that of one token a step, whatever was guessed; the sequence's Guessed counts right ones, times.py times steps
"""

from engine.speculate.lookup import Lookup
from engine.speculate.pace import Pace
from engine.speculate.speculation import Proposer, Speculation

__all__ = ["Lookup", "Pace", "Proposer", "Speculation"]
