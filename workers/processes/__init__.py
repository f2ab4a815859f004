"""Child processes of this one: supervisor keeps them running and stops them, guard ends them with their parent.

`penstock up`, `penstock worker --gpus` and the autoscaler's local actuator run their workers by it.
"""
