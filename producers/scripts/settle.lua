-- SETTLE(c) | after the tracer: settled, clears claim and owner; record and stream TTL start here.
-- Only the winner of FINISH, or whom CLAIM told to settle, calls it; a record that is not final is left alone.
-- KEYS: task, stream   ARGV: id, default TTL (seconds)
-- Answers: 1 settled (also before) | 0
-- include: _final.lua
local r = redis.call('HMGET', KEYS[1], 'status', 'settled', 'ttl')
if not r[1] or not FINAL[r[1]] then
  return 0
end
if not r[2] then
  redis.call('HSET', KEYS[1], 'settled', now_ms())
  local ttl = tonumber(r[3] or ARGV[2])
  redis.call('EXPIRE', KEYS[1], ttl)
  redis.call('EXPIRE', KEYS[2], ttl)
end
redis.call('HDEL', KEYS[1], 'claim', 'owner')
return 1
