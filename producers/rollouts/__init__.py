"""Rollouts that judge: a candidate version gets a growing part of a model's tasks, and is compared with the baseline.

`penstock rollout start` ─▶ state ─▶ controller (the sweeper that leads): workers are up ─▶ first step
    ─▶ rows of the ledger ─▶ metrics: comparisons ─▶ evidence ─▶ decision: a row, then ROUTE ─▶ next step, ... or back

State and rows are in `producers.store.fleet.canaries`. `metrics` says what is compared, `evidence` how sure that is,
`controller` decides and acts, `operations` is what operators do, `report` what they read.
"""
