"""From logits to the next tokens, for all sequences of a step at once.

rows.py keeps each running sequence's parameters in a permanent row and gathers a step's rows into a SamplingBatch;
sampler.py edits the logits (edits.py: penalties, biases, bans; edit_rows.py keeps what they take), takes the likeliest
where the temperature is 0, and elsewhere adds noise to what filters.py (top-k, top-p, min-p, typical) leaves and takes
the largest. noise.py makes that noise from (seed, choice, position,
token) alone, so that a token does not depend on the batch it was sampled in, nor on what happened in between.
logprobs.py says how likely the model itself held a token, chosen or of the prompt.
"""

from engine.sampling.logprobs import score_prompts
from engine.sampling.rows import SamplingBatch, SamplingRows
from engine.sampling.sampler import chosen, sample

__all__ = ["SamplingBatch", "SamplingRows", "chosen", "sample", "score_prompts"]
