"""The protocol, twice: as an exhaustive model (`model`), and as the Lua scripts that run in production.

`model` visits every state that crashes, lapsed leases, lost replies and duplicates can lead to, and checks invariants.
`test_model.py` keeps that clean, and shows that rules are needed. `test_scripts.py` and `test_broker.py` drive the real
scripts on a real server (`server`) beside the model's functions (`store`) and the broker in memory,
and compare every answer and all that is stored. `test_mutants.py` breaks the scripts, and expects them to notice.
"""
