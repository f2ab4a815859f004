"""The broker on Redis or Valkey: lists by tier, a hash of deliveries in flight for each worker, turns by tenant.

broker implements the interface of `producers.broker.base`; its waker is a connection that reports changes of lists
calls has one function a script, which gives the `Call` to send and reads its answer; scripts/ has the Lua. Its
`Books` are the part of both sides that is in Redis or Valkey also where the messages are elsewhere
keys has the names of all keys
"""
