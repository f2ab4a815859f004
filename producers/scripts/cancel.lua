-- CANCEL | no record, or final: not accepted; else the flag. A queued task that nobody live owns is final at once
-- (settled at its next CLAIM); one still `submitting` only gets the flag, because the sweeper re-sends no final
-- record, and without a message it would never be settled.
-- KEYS: task, stream   ARGV: id
-- Answers: {accepted 0|1, status | gone}
-- include: _final.lua
local task, stream, id = KEYS[1], KEYS[2], ARGV[1]
local r = redis.call('HMGET', task, 'status', 'owner', 'cancel')
local status, owner = r[1], r[2]
if not status then
  return { 0, 'gone' }
end
if FINAL[status] then
  return { 0, status }
end
if not r[3] then
  redis.call('HSET', task, 'cancel', now_ms())
end
local live = owner and redis.call('EXISTS', 'penstock:lease:' .. owner) == 1
if live then
  redis.call('PUBLISH', 'penstock:control:' .. owner, 'cancel ' .. id)
elseif status ~= 'submitting' then
  redis.call('HDEL', task, 'claim', 'owner')
  finalise(task, stream, id, 'cancelled', '[]', 'null', prompt_used(task), 0)
  status = 'cancelled'
end
return { 1, status }
