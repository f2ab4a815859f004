"""Injects faults into a system under load and checks that it kept its promises.

    seed -> `plan` (written down first) -> `injector` -> a scene (`operated`, or tests/chaos): its processes, servers
    seed -> `load` -> `client` processes (`caller`, `senders`) -> journals -> `checker` -> report
                                     the same tasks once more, without faults -/

`penstock chaos` does this to a staging system. tests/chaos does it to a system of its own, with more kinds of faults.
"""
