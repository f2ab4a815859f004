"""Decides what each step computes. Needs no torch.

submit: limits refuses what can never run; group opens a request's choices as sequences; policy queues them by tier
next plan: fairness says whose turn it is, planner fills the step's token budget and KV blocks, preempting if it must
after the step: scheduler takes the sampled tokens, tells the callers, frees the blocks of what has ended
stats counts it all
"""
