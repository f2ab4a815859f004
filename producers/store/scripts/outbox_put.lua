#!lua flags=allow-oom
-- PUT(row) | no such row: it is due now, or dead where too many of its tenant are due; else nothing.
-- KEYS: row, due   ARGV: name, source (of a reply, else empty), field, value, ...
-- Answers: 1 put | 0 it exists (also if put before)
-- include: _outbox_kept.lua
if redis.call('EXISTS', KEYS[1]) == 1 then
  return 0
end
local t = redis.call('TIME')
redis.call('HSET', KEYS[1], 'at', t[1], 'state', 'due', 'tries', 0, unpack(ARGV, 3))
local now = t[1] * 1000 + math.floor(t[2] / 1000)
if ARGV[2] ~= '' then
  redis.call('ZADD', KEYS[2], now, ARGV[1])
  redis.call('SADD', 'penstock:replies', ARGV[2])
elseif not outbox_due(KEYS[1], ARGV[1], redis.call('HGET', KEYS[1], 'tenant'), t[1], now) then
  return 1
end
redis.pcall('PUBLISH', 'penstock:webhooks:wake', ARGV[2])
return 1
