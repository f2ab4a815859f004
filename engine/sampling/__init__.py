"""Samples the next tokens from logits, for all sequences of a step at once.

rows: keeps each running sequence's parameters in a permanent row and gathers a step's rows into a SamplingBatch
edits: changes the logits (penalties, biases, bans); edit_rows and counts keep the data for that
filters: top-k, top-p, min-p, typical sampling; noise: makes Gumbel noise from (seed, choice, position, token) alone, so
        that a token depends neither on the other sequences in the batch nor on what happened before
sampler: takes the most likely token of greedy requests, else the largest sum of filtered logit and noise
logprobs: log probabilities of chosen tokens and of prompts, from the model's own distribution
"""

from engine.sampling.logprobs import score_prompts
from engine.sampling.rows import SamplingBatch, SamplingRows
from engine.sampling.sampler import chosen, sample

__all__ = ["SamplingBatch", "SamplingRows", "chosen", "sample", "score_prompts"]
