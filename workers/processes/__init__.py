"""Child processes of this one.

supervisor keeps a child running and stops it; guard ends it with its parent; readiness hears that it serves; standby
has imported all that a worker needs, and becomes the next one. The workers of `penstock up`, of `penstock worker
--gpus` and of the autoscaler's local actuator run by it.
"""
