-- Shared by QUEUED and BATCH_QUEUED.
-- include: producers.connection/_now.lua
local function queued(task, submitting, id)
  local status = redis.call('HGET', task, 'status')
  redis.call('ZREM', submitting, id)
  if not status then
    return 'gone'
  end
  if status ~= 'submitting' then
    return status
  end
  redis.call('HSET', task, 'status', 'queued', 'queued', now_ms())
  return 'queued'
end
