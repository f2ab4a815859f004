#!lua flags=allow-oom
-- LAPSED(done) | removes the leases of `done` that are still lapsed, and answers the other lapsed leases.
-- `done`: tasks that the caller has CANCELled; UNREAD does both in one call.
-- KEYS: readers   ARGV: limit, id, ...
-- Answers: id, end of its lease (ms), ...; oldest first, at most `limit` of them
-- include: producers.connection/_now.lua
local now = now_ms()
for i = 2, #ARGV do
  local over = redis.call('ZSCORE', KEYS[1], ARGV[i])
  if over and tonumber(over) <= now then
    redis.call('ZREM', KEYS[1], ARGV[i])
  end
end
return redis.call('ZRANGEBYSCORE', KEYS[1], '-inf', now, 'WITHSCORES', 'LIMIT', 0, ARGV[1])
