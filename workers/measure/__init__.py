"""A worker's measurements of itself, for whoever decides how many workers there should be.

    engine's thread   a step's work ─▶ StepTimes (seconds by size), Duty, Increments
    publisher         first token of a task, end of a task ─▶ FirstTokens, Tasks; gaps between tokens ─▶ Increments
    housekeeper       about them all ─▶ Measured.profile ─▶ the lease, and `penstock:profiles` (Keeper)
                      Increments ─▶ `penstock:metrics:*`, for the gateways' counters and histograms

All of it takes constant memory. A step costs a few microseconds.
"""
