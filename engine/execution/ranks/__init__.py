"""A model that several processes compute together, each its share of every matrix (engine/models/shares.py).

    lead: scheduler, sampler, all state -> runner: a step as arrays -> exchange -> followers replay it, for its sums
                                                                    <- exchange <- their part of the logits

runner: a stage's first rank, what its followers do, and messages as bytes; stages: layers in several processes, one
after another; device: ranks on GPUs; group: starts the followers and watches them; nodes: those of other machines;
follower: their process

Nothing is imported here: a follower ignores signals, and is bound to the lead's life, before torch is imported.
"""
