#!lua flags=allow-oom
-- LEASE(inc) | `take`: the lease begins, and the incarnation is listed with its queue; else an existing lease is
-- renewed. The value has the last join, and `listens` if the incarnation's alive channel has a subscriber here.
-- A script, because a full server refuses a plain SET: all workers, which free memory, would then count as dead.
-- KEYS: lease, incarnations   ARGV: inc, the worker's state (JSON), ttl (ms), take 0|1, queue
-- Answers: 1 | 0 gone
-- include: producers.contract/_alive.lua
if ARGV[4] == '0' and redis.call('EXISTS', KEYS[1]) == 0 then
  return 0
end
redis.call('SET', KEYS[1], lease_of(ARGV[1], ARGV[2]), 'PX', ARGV[3])
if ARGV[4] == '1' then
  redis.call('HSET', KEYS[2], ARGV[1], ARGV[5])
end
return 1
