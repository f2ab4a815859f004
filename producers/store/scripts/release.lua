#!lua flags=allow-oom
-- RELEASE(c) | claim = c: the claim is cleared, also of a final unsettled task; `queued` if not final. Counts no death.
-- KEYS: task   ARGV: claim
-- Answers: 1 released | 0
-- include: _final.lua
local r = redis.call('HMGET', KEYS[1], 'status', 'claim')
if not r[1] or r[2] ~= ARGV[1] then
  return 0
end
redis.call('HDEL', KEYS[1], 'claim', 'owner')
if not FINAL[r[1]] then
  redis.call('HSET', KEYS[1], 'status', 'queued')
end
return 1
