"""Rolling updates: the state of each model's last one, as asked for by `penstock rollout`.

One JSON object in the hash `penstock:rollouts` under the model's name:

    model       the model's name
    reference   the new version as workers are told it: NAME=FOLDER, hf://OWNER/NAME, ...
    version     the new version (`engine.text.checkpoint.model_version`)
    before      the version that new tasks had when the rollout was asked for, or null
    workers     ready workers of the new version to wait for
    phase       "starting": new workers come up, new tasks still go to `before`
                "draining": the card is the new version's; workers of `before` go on until nothing of it is queued or
                in flight
                "done", "failed", "cancelled"
    reason      why it failed, or what it waits for
    asked       unix seconds
    changed     unix seconds of the last phase's begin

The card decides: a phase never says where tasks go. Whoever carries a rollout out may die between any two writes; the
next one reads the card and the leases, and goes on.
"""
