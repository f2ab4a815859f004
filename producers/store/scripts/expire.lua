#!lua flags=allow-oom
-- EXPIRE | cancel accepted or deadline passed, not final, no live owner: final. The status is `cancelled` after a
-- cancel (CANCEL could not end it while its owner lived), `incomplete` with the output so far if the task was ever
-- started, else `failed` as expired. It is settled at its next CLAIM. A live owner ends its task itself. A `submitting`
-- task is left alone: the sweeper sends no final record, and without a message it would never be settled.
-- A task without need for it (no record, final, or neither deadline nor cancel) leaves the index.
-- KEYS: task, stream, deadlines   ARGV: id
-- Answers: the status then | gone
-- include: _final.lua
-- include: _late.lua
local task, stream, deadlines, id = KEYS[1], KEYS[2], KEYS[3], ARGV[1]
local r = redis.call('HMGET', task, 'status', 'owner', 'deadline', 'cancel', 'claims')
local status, owner = r[1], r[2]
if not status or FINAL[status] or not (r[3] or r[4]) then
  redis.call('ZREM', deadlines, id)
  return status or 'gone'
end
local live = owner and redis.call('EXISTS', 'penstock:lease:' .. owner) == 1
if live or status == 'submitting' or not r[4] and tonumber(r[3]) > now_ms() then
  return status
end
redis.call('HDEL', task, 'claim', 'owner')
if r[4] then
  finalise(task, stream, id, 'cancelled', '[]', 'null', prompt_used(task), 0)
  return 'cancelled'
end
return late(task, stream, id, r[5])
