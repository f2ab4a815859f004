#!lua flags=allow-oom
-- ORPHAN(gone) | final, not settled, and nobody live owns it: settled, without its message. A plain Celery task (links,
-- chords) and one that was given up (the message is kept) need theirs: they are left to whoever gets it, unless the
-- caller has seen that it is nowhere any more (`gone`).
-- What is not final, or settled, or has no record any more leaves the index.
-- KEYS: task, stream, unsettled   ARGV: id, default TTL (seconds), gone 0|1
-- Answers: settled (also before) | owned | message | gone (no record) | open (not final)
-- include: _final.lua
-- include: _settle.lua
local task, stream, id = KEYS[1], KEYS[2], ARGV[1]
local r = redis.call('HMGET', task, 'status', 'settled', 'owner', 'plain', 'error')
if not r[1] or not FINAL[r[1]] or r[2] then
  redis.call('ZREM', KEYS[3], id)
  return not r[1] and 'gone' or r[2] and 'settled' or 'open'
end
if r[3] and redis.call('EXISTS', 'penstock:lease:' .. r[3]) == 1 then
  return 'owned'
end
if ARGV[3] ~= '1' then
  local err = r[5] and cjson.decode(r[5])
  if r[4] or (type(err) == 'table' and err.code == 'dead_lettered') then
    return 'message'
  end
end
settle(task, stream, id, ARGV[2])
return 'settled'
