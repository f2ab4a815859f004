"""What comes from strangers: messages on the queue, HTTP requests, files; and whether anything leaks of it all.

    trees (JSON changed at any place) -> messages -> on_queue: a worker; `ends` says how each message ended
                                      -> requests -> on_http: a gateway and a worker; `answers` says what they may be
    soak_load (both among good requests) -> soak: all processes; watch (what they hold) -> growth: is that a leak?
    parsers: each of our readers of files and texts by itself, with a corpus of what was found

`on_queue`, `on_http`, `soak` and `parsers` are commands (`python -m tests.fuzz.on_http --help`) and, in small, tests.
Examples are drawn by Hypothesis under a seed: the same ones each time.
"""
