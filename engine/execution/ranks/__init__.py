"""A model that several processes compute together, each its share of every matrix (engine/models/shares.py).

    lead: scheduler, sampler, all state -> runner: a step as arrays -> exchange -> followers replay it, for its sums
                                                                    <- exchange <- their part of the logits

messages: arrays as bytes; runner: the lead's runner and model, and what a follower does
group: starts the followers and watches them; follower: their process

Nothing is imported here: a follower ignores signals, and is bound to the lead's life, before torch is imported.
"""
