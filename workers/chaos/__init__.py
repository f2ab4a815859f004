"""A system under load, to which faults are done, and which is then proven to have kept its promises.

    seed -> `plan` (written down first) -> `injector` -> a scene (`operated`, or tests/chaos): its processes, servers
    seed -> `load` -> `client` processes (`talk`, `senders`) -> `journal` -> `checker` -> report
                                           the same tasks once more, in quiet -/

`penstock chaos` does it to a staging system; tests/chaos to one of its own, with faults that need one.
"""
