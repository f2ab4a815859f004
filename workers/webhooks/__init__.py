"""Delivers the outbox's rows to webhooks (`penstock webhooks run`). Any number of such processes may run.

    deliverer: TAKE due rows ─▶ `targets`: URL and secrets now ─▶ limits: has it room? ── no ─▶ RETRY, later
                                                                   │ yes
                     sender: resolve, check addresses, connect to one of them, POST, read 1 KB of the answer
                                                                   │
                     2xx: DELIVERED     else: RETRY by the schedule, at its end DEAD     410: DEAD, endpoint disabled

Rows are leased, so what a killed process held is due again when the lease ends. An event may arrive twice, always with
the same webhook-id. Needs the extra `penstock[webhooks]`, and no torch.
"""
