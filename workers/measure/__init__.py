"""A worker's measurements of itself, for whoever decides how many workers there should be.

    engine's thread   a step's work ─▶ StepTimes (seconds by size), Duty
    publisher         first token of a task, end of a task ─▶ FirstTokens, Tasks
    housekeeper       about them all ─▶ Measured.profile ─▶ the lease, and `penstock:profiles` (Keeper)

All of it takes constant memory. A step costs a few microseconds.
"""
