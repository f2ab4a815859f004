#!lua flags=allow-oom
-- DELETE | a record: it, its stream and its blocks are gone, it leaves every index, and its bytes are counted no more; a
-- task that is not final is cancelled first, in the same script, so that its readers get an end. No record: nothing.
-- A live owner is told to stop. Whatever it, a message or a sweeper still does finds no record: APPEND and FINISH say
-- `gone`, CLAIM says `done`.
-- KEYS: task, stream   ARGV: id
-- Answers: the status before | gone
-- include: _final.lua
-- include: _result.lua
-- include: _kept.lua
local task, stream, id = KEYS[1], KEYS[2], ARGV[1]
local r = redis.call('HMGET', task, 'status', 'owner')
if not r[1] then
  return 'gone'
end
if not FINAL[r[1]] then
  if r[2] and redis.call('EXISTS', 'penstock:lease:' .. r[2]) == 1 then
    redis.call('PUBLISH', 'penstock:control:' .. r[2], 'cancel ' .. id)
  end
  finalise(task, stream, id, 'cancelled', '[]', 'null', prompt_used(task), 0)
end
kept_gone(task)
redis.call('UNLINK', task, stream)
drop_result(id)
for _, index in ipairs({ 'submitting', 'deadlines', 'unsettled', 'settled', 'readers' }) do
  redis.call('ZREM', 'penstock:' .. index, id)
end
return r[1]
