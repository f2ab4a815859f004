"""What holds whatever is done to whom, and whenever: real processes, real faults.

    __main__             a `stage` of its own (`servers`, `links`, `processes`) under load suffers a plan of faults
                         (`driver`); plan, load, injector and checker are those of `workers.trials.chaos`
    kill_between_calls   a worker dies between every two adjacent calls to broker or store, and loses each reply:
                         worker (`warm`) -> `tap` (counts the calls, strikes at one) -> server; then `scenario` judges
    drain                a worker with hundreds of running sequences is told to end

Each is a command (`python -m tests.chaos --help`) and, in a small version, a test.
"""
