"""Simulates a pool under a trace of arrivals, with the same `decide` that the autoscaler calls.

    trace (recorded) or synthetic ─▶ Arrival ─▶ simulation: queue by tier ─▶ Worker (batch, credit, preemption, drain)
                                                  ▲  │ signals, every few seconds
                                                  │  ▼
                                    scaler: the policy | KEDA's listLength | an HPA on CPU | a schedule (clairvoyant)

    ─▶ Outcome ─▶ compare (figures), plot (SVG)

`replay` takes kept decisions instead, and computes each of them again.
"""
