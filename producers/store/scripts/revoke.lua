#!lua flags=allow-oom
-- REVOKE | Celery's revoke, as a sweeper hears it. No record: the id is noted for a time, and CLAIM cancels what a plain
-- message makes of it then; only so many ids are kept, those that were noted last. A live owner: nothing, for it hears
-- of it by itself, and knows whether a task that runs is to end. Else as CANCEL.
-- KEYS: task, stream, revoked   ARGV: id, time for which it is noted (ms), most ids
-- Answers: noted | owned | the status then, of CANCEL
-- include: _final.lua
-- include: _cancel.lua
local r = redis.call('HMGET', KEYS[1], 'status', 'owner')
if not r[1] then
  local now = now_ms()
  redis.call('ZREMRANGEBYSCORE', KEYS[3], '-inf', now)
  redis.call('ZADD', KEYS[3], now + ARGV[2], ARGV[1])
  redis.call('ZREMRANGEBYRANK', KEYS[3], 0, -1 - ARGV[3])
  return 'noted'
end
if r[2] and redis.call('EXISTS', 'penstock:lease:' .. r[2]) == 1 then
  return 'owned'
end
return cancel(KEYS[1], KEYS[2], ARGV[1])[2]
