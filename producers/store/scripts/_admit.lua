-- include: _result.lua
-- include: _waiting.lua
-- Shared by ADMIT and BATCH_EXPAND. It makes a record of these fields, and enters the task into the indexes and the
-- counts of what waits; a parent, which waits for its chunks alone, enters the open parents (_chunks.lua). Stream and blocks of an earlier task with this id outlive its record, so they are removed.
local function admit(task, submitting, deadlines, id, now, fields, parent)
  redis.call('HSET', task, unpack(fields))
  redis.call('UNLINK', 'penstock:stream:' .. id)
  drop_result(id)
  if parent then
    redis.call('ZADD', 'penstock:waiting:parents', now, id)
  else
    redis.call('ZADD', submitting, now, id)
  end
  local deadline = redis.call('HGET', task, 'deadline')
  if deadline then
    redis.call('ZADD', deadlines, deadline, id)
  end
  if not parent then
    wait_begins(task)
  end
end
