"""`penstock autoscaler`: decides how many workers each pool should have, and has them started and drained.

    signals (queues, leases, profiles) ─▶ policy (pure) ─▶ decision, kept in the store ─▶ actuator ─▶ workers
                                             ▲                                             │
                                             └───────── trials: the same policy ◀── what it observes

Any number of autoscalers run and one leads. Whoever follows the exported number (`penstock_desired_workers` in the
gateway's /metrics) needs no actuator here: KEDA, say.
"""
