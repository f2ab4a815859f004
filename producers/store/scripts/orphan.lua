#!lua flags=allow-oom
-- ORPHAN(gone) | final, not settled, no live owner: settled without its message. A plain Celery task (links, chords)
-- and a task that was given up (its message is kept) need their message: they are left to the worker that gets it,
-- unless the caller has seen that the message no longer exists (`gone`). A parent has none.
-- A task that is not final, is settled or has no record leaves the index.
-- KEYS: task, stream, unsettled   ARGV: id, default TTL (seconds), gone 0|1
-- Answers: settled (also if done before) | owned | message | gone (no record) | open (not final)
-- include: _final.lua
-- include: _settle.lua
local task, stream, id = KEYS[1], KEYS[2], ARGV[1]
local r = redis.call('HMGET', task, 'status', 'settled', 'owner', 'plain', 'error', 'chunks')
if not r[1] or not FINAL[r[1]] or r[2] then
  redis.call('ZREM', KEYS[3], id)
  return not r[1] and 'gone' or r[2] and 'settled' or 'open'
end
if r[3] and redis.call('EXISTS', 'penstock:lease:' .. r[3]) == 1 then
  return 'owned'
end
if ARGV[3] ~= '1' and not r[6] then
  local err = r[5] and cjson.decode(r[5])
  if r[4] or (type(err) == 'table' and err.code == 'dead_lettered') then
    return 'message'
  end
end
settle(task, stream, id, ARGV[2])
return 'settled'
