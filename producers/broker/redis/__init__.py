"""The broker on Redis or Valkey: lists by tier, a hash of deliveries in flight for each worker, turns by tenant.

consumer and operator implement the two faces of `producers.broker.base`; waker is a connection that hears of changes
books has the part of an operator's that is in Redis or Valkey also where the messages are not
calls has one function a script, which gives the `Call` to send and reads its answer; scripts/ has the Lua
keys has the names of all keys
"""
