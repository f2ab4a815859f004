#!lua flags=allow-oom
-- UNSERVED | `queued` or `in_progress`, without a live owner, of a level (`producers/contract/levels.py`); a worker of
-- its version lives, and none whose release can do it: final. The status is `incomplete` with the output so far if the
-- task was ever started, else `failed`. It is settled at its next CLAIM, or by ORPHAN.
-- KEYS: task, stream, workers of each of its version's pools ...
-- ARGV: id, the error (JSON), the incarnations that the broker lists with these pools ...
-- Answers: the status then | gone
-- include: _final.lua
-- include: _late.lua
-- include: producers.connection/_level.lua
local task, stream, id = KEYS[1], KEYS[2], ARGV[1]
local r = redis.call('HMGET', task, 'status', 'owner', 'level', 'claims')
local status, owner, level = r[1], r[2], tonumber(r[3] or '0')
if not (status == 'queued' or status == 'in_progress') or level == 0
  or owner and redis.call('EXISTS', 'penstock:lease:' .. owner) == 1 then
  return status or 'gone'
end
local workers, lives = { unpack(ARGV, 3) }, false
for k = 3, #KEYS do
  for _, worker in ipairs(redis.call('SMEMBERS', KEYS[k])) do
    workers[#workers + 1] = worker
  end
end
for _, worker in ipairs(workers) do
  if lives_at(worker, level) then
    return status
  end
  lives = lives or lives_at(worker, 0)
end
if not lives then
  return status
end
redis.call('HDEL', task, 'claim', 'owner')
return late(task, stream, id, r[4], ARGV[2])
