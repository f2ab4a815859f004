"""Usage by key, tenant and model, and its cost.

a script that ends a task ─▶ ledger: a row ─▶ FOLD: sums of hours ─▶ ROLL: sums of days ─▶ PRUNE
                                └──────────────────┴──────────────────────┴─▶ report, with prices ─▶ `penstock usage`
"""
