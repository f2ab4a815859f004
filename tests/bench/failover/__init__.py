"""How long open streams stand still when a process dies: `python -m tests.bench.failover`.

    system (Valkey, workers, gateways) <- load (streams, read over HTTP) <- blow (one round: kill, watch, wait)
    -> report (percentiles by phase, streams that are wrong)

Each worker serves the bundled model. Streams are seeded, and compared with those of a quiet run at the beginning: each
position once, each token the same.
"""
