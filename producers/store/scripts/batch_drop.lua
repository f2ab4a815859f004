#!lua flags=allow-oom
-- BATCH_DROP | the batch has ended: these tasks of its lines are forgotten. Else nothing.
-- KEYS: batch   ARGV: batch's id, task's id, ...
-- Answers: 1 | 0
-- include: _batch.lua
local status = redis.call('HGET', KEYS[1], 'status')
if status and not ENDED[status] then
  return 0
end
for k = 2, #ARGV do
  drop(ARGV[1], ARGV[k])
end
return 1
