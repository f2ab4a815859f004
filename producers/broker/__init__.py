"""The broker's side of the protocol: queues by tier, deliveries and leases.

redis has one function a script, which gives the `Call` to send and reads its answer; scripts/ has the Lua
"""
