"""Samples the next tokens from logits, for all sequences of a step at once.

rows: keeps each running sequence's parameters in a permanent row and gathers a step's rows into a SamplingBatch
     its edits change the logits (penalties, biases, bans, a watermark: `watermark` adds and finds it)
draws: top-k, top-p, min-p, typical sampling; makes Gumbel noise from (seed, choice, position, token) alone, so that a
      token depends neither on the other sequences in the batch nor on what happened before
sampler: takes the most likely token of greedy requests, else the largest sum of filtered logit and noise; log
        probabilities of chosen tokens and of prompts, from the model's own distribution
"""

from engine.sampling.rows import SamplingBatch, SamplingRows
from engine.sampling.sampler import chosen, sample, score_prompts

__all__ = ["SamplingBatch", "SamplingRows", "chosen", "sample", "score_prompts"]
