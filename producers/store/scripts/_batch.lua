-- Shared by the scripts of batches.
local ENDED = { completed = true, failed = true, expired = true, cancelled = true }

-- include: _outbox.lua
-- include: _result.lua
-- include: producers.connection/_now.lua

-- A batch's end is an event.
local function tell(batch, id, status)
  local r = redis.call('HMGET', batch, 'created', 'tenant', 'restored')
  outbox_event('batch.' .. status, id, r[1], { tenant = r[2], restored = r[3] })
end

-- Forgets a line's task, whose result is written or not wanted. A task that is not settled yet is left to SETTLE or
-- ORPHAN, and kept for a minute after it.
local function drop(batch, id)
  local task = 'penstock:task:' .. id
  local r = redis.call('HMGET', task, 'batch', 'settled')
  if r[1] ~= batch then
    return
  end
  if r[2] then
    redis.call('UNLINK', task, 'penstock:stream:' .. id)
    drop_result(id)
    redis.call('ZREM', 'penstock:settled', id)
  else
    redis.call('HSET', task, 'ttl', 60)
  end
end
