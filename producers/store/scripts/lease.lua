#!lua flags=allow-oom
-- LEASE(inc, pool) | `take`: it is entered; else renewed where it is there. One that serves is listed with its pool's
-- workers, for as long; one that drains or is held back is not. The value says `listens`, and the last join, where its
-- alive channel is heard here. A script, because a plain SET is refused when memory is full: then all workers would be
-- taken for dead, who are to make room. The broker has one of its own.
-- None where the store has another epoch than the worker, or is being restored (`producers/store/epoch.py`).
-- KEYS: lease, workers of the pool
-- ARGV: inc, what it says of itself (JSON), ttl (ms), take 0|1, serves 0|1, the worker's epoch (or empty)
-- Answers: 1 | 0 gone | -1 another epoch: nothing is done
-- include: producers.contract/_alive.lua
-- include: _epoch.lua
if other_epoch(ARGV[6]) then
  return -1
end
if ARGV[4] == '0' and redis.call('EXISTS', KEYS[1]) == 0 then
  return 0
end
redis.call('SET', KEYS[1], lease_of(ARGV[1], ARGV[2]), 'PX', ARGV[3])
if ARGV[4] == '1' then -- whoever died before is forgotten now and then
  for _, worker in ipairs(redis.call('SMEMBERS', KEYS[2])) do
    if redis.call('EXISTS', 'penstock:lease:' .. worker) == 0 then
      redis.call('SREM', KEYS[2], worker)
    end
  end
end
redis.call(ARGV[5] == '1' and 'SADD' or 'SREM', KEYS[2], ARGV[1])
redis.call('PEXPIRE', KEYS[2], math.max(ARGV[3], redis.call('PTTL', KEYS[2])))
return 1
