"""What holds whichever process dies, and whenever: real processes, real kills.

    kill_between_calls   a worker dies between every two adjacent calls to broker or store, and loses each reply:
                         worker (`warm`) -> `tap` (counts the calls, strikes at one) -> server; then `scenario` judges
    kill_workers         workers are killed at random moments under load, while readers follow every stream:
                         `fleet` and `load` go on, and are judged at the end

Each is a command (`python -m tests.chaos.kill_workers --help`) and, in a small version, a test.
"""
