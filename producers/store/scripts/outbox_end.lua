#!lua flags=allow-oom
-- DELIVERED, DEAD | the row is held by `holder`: it is `delivered` or `dead`, with its attempts; else nothing. The
-- holder stays, so that a call that is sent again is answered alike.
-- KEYS: row, due, delivered or dead   ARGV: name, holder, delivered | dead, attempts (JSON array)
-- Answers: 1 done (also if done before) | 0 another holder has it, or it is gone
-- The oldest of its tenant's goes, where there are too many (_outbox_kept.lua).
-- include: producers.connection/_now.lua
-- include: _outbox_kept.lua
local r = redis.call('HMGET', KEYS[1], 'state', 'holder', 'tenant', 'source')
if r[2] ~= ARGV[2] then
  return 0
end
if r[1] == 'due' then
  redis.call('ZREM', KEYS[2], ARGV[1])
  redis.call('HSET', KEYS[1], 'state', ARGV[3], 'attempts', ARGV[4])
  redis.call('HINCRBY', KEYS[1], 'tries', 1)
  if not r[4] then
    outbox_waits(r[3], -1)
  end
  outbox_ended(ARGV[3], ARGV[1], r[3], now_ms())
end
return redis.call('HGET', KEYS[1], 'state') == ARGV[3] and 1 or 0
