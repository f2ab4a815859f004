#!lua flags=allow-oom
-- UNSERVED | `queued` or `in_progress`, without a live owner, of a level (`producers/contract/levels.py`), and for so long
-- in the store; a worker of its version lives, and none whose release can do it: final. The status is `incomplete` with
-- the output so far if the task was ever started, else `failed`. It is settled at its next CLAIM, or by ORPHAN.
-- KEYS: task, stream
-- ARGV: id, the error (JSON), its version's queue, for how long (ms), the incarnations that the broker lists with the
--       version's pools ... (where pools have no queues of their own, the store lists none)
-- Answers: ended | the status | gone
-- include: _final.lua
-- include: _late.lua
-- include: producers.connection/_level.lua
local task, stream, id = KEYS[1], KEYS[2], ARGV[1]
local r = redis.call('HMGET', task, 'status', 'owner', 'level', 'claims', 'created')
local status, owner, level = r[1], r[2], tonumber(r[3] or '0')
if not (status == 'queued' or status == 'in_progress') or level == 0
  or now_ms() - tonumber(r[5] or '0') < tonumber(ARGV[4])
  or owner and redis.call('EXISTS', 'penstock:lease:' .. owner) == 1 then
  return status or 'gone'
end
local workers, lives = {}, false
for k = 5, #ARGV do
  workers[ARGV[k]] = true
end
for _, pool in ipairs(pools_of(ARGV[3])) do -- as it is now: one may be new
  for _, worker in ipairs(redis.call('SMEMBERS', 'penstock:workers:' .. pool)) do
    workers[worker] = true
  end
end
for worker in pairs(workers) do
  if lives_at(worker, level) then
    return status
  end
  lives = lives or lives_at(worker, 0)
end
if not lives then
  return status
end
redis.call('HDEL', task, 'claim', 'owner')
late(task, stream, id, r[4], ARGV[2], '"error"')
return 'ended'
