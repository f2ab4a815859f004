#!lua flags=allow-oom
-- TRIM(state, age, most) | removes rows that have been `delivered` or `dead` for longer than `age`, and the oldest
-- beyond `most`; at most `limit` in a call. Where no webhook is due, none is counted.
-- KEYS: delivered or dead   ARGV: age (ms), most, limit
-- Answers: the number of rows removed
-- include: producers.connection/_now.lua
-- include: _outbox_kept.lua
if redis.call('EXISTS', 'penstock:webhooks:due') == 0 then
  redis.call('DEL', 'penstock:webhooks:waiting')
end
local before = now_ms() - ARGV[1]
local names = redis.call('ZRANGEBYSCORE', KEYS[1], '-inf', before, 'LIMIT', 0, ARGV[3])
if #names == 0 then
  local over = math.min(redis.call('ZCARD', KEYS[1]) - ARGV[2], tonumber(ARGV[3]))
  names = over > 0 and redis.call('ZRANGE', KEYS[1], 0, over - 1) or names
end
for _, name in ipairs(names) do
  outbox_left(name, redis.call('HGET', 'penstock:webhooks:row:' .. name, 'tenant'))
  redis.call('UNLINK', 'penstock:webhooks:row:' .. name)
  redis.call('ZREM', KEYS[1], name)
end
return #names
