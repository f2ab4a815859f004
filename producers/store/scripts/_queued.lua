-- Shared by QUEUED and BATCH_QUEUED.
local function queued(task, submitting, id)
  local status = redis.call('HGET', task, 'status')
  redis.call('ZREM', submitting, id)
  if not status then
    return 'gone'
  end
  if status ~= 'submitting' then
    return status
  end
  local t = redis.call('TIME')
  redis.call('HSET', task, 'status', 'queued', 'queued', t[1] * 1000 + math.floor(t[2] / 1000))
  return 'queued'
end
