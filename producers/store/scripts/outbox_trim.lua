#!lua flags=allow-oom
-- TRIM(state, age, most) | removes rows that have been `delivered` or `dead` for longer than `age`, and the oldest
-- beyond `most`; at most `limit` in a call.
-- KEYS: delivered or dead   ARGV: age (ms), most, limit
-- Answers: the number of rows removed
local t = redis.call('TIME')
local before = t[1] * 1000 + math.floor(t[2] / 1000) - ARGV[1]
local names = redis.call('ZRANGEBYSCORE', KEYS[1], '-inf', before, 'LIMIT', 0, ARGV[3])
if #names == 0 then
  local over = math.min(redis.call('ZCARD', KEYS[1]) - ARGV[2], tonumber(ARGV[3]))
  names = over > 0 and redis.call('ZRANGE', KEYS[1], 0, over - 1) or names
end
for _, name in ipairs(names) do
  redis.call('UNLINK', 'penstock:webhooks:row:' .. name)
  redis.call('ZREM', KEYS[1], name)
end
return #names
