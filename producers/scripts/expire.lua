#!lua flags=allow-oom
-- EXPIRE | the deadline has passed, the record is not final and nobody live owns it: final, `incomplete` with what it
-- has where it was ever taken up, else `failed` as expired; `cancelled` where a cancel was accepted before (settled at
-- its next CLAIM). A live owner ends its task itself; one still `submitting` is left to the sweeper, which re-sends no
-- final record, and without a message it would never be settled.
-- What has no deadline any more (no record, or final) leaves the index.
-- KEYS: task, stream, deadlines   ARGV: id
-- Answers: the status after it | gone
-- include: _final.lua
-- include: _late.lua
local task, stream, deadlines, id = KEYS[1], KEYS[2], KEYS[3], ARGV[1]
local r = redis.call('HMGET', task, 'status', 'owner', 'deadline', 'cancel', 'claims')
local status, owner = r[1], r[2]
if not status or FINAL[status] or not r[3] then
  redis.call('ZREM', deadlines, id)
  return status or 'gone'
end
local live = owner and redis.call('EXISTS', 'penstock:lease:' .. owner) == 1
if live or status == 'submitting' or tonumber(r[3]) > now_ms() then
  return status
end
redis.call('HDEL', task, 'claim', 'owner')
if r[4] then
  finalise(task, stream, id, 'cancelled', '[]', 'null', prompt_used(task), 0)
  return 'cancelled'
end
return late(task, stream, id, r[5])
