-- include: _result.lua
-- include: _waiting.lua
-- Shared by ADMIT and BATCH_EXPAND. It makes a record of these fields, and enters the task into the indexes and the
-- counts of what waits. Stream and blocks of an earlier task with this id outlive its record, so they are removed.
local function admit(task, submitting, deadlines, id, now, fields)
  redis.call('HSET', task, unpack(fields))
  redis.call('UNLINK', 'penstock:stream:' .. id)
  drop_result(id)
  redis.call('ZADD', submitting, now, id)
  local deadline = redis.call('HGET', task, 'deadline')
  if deadline then
    redis.call('ZADD', deadlines, deadline, id)
  end
  wait_begins(task)
end
