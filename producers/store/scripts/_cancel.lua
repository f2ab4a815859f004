-- Shared by CANCEL and UNREAD.
local function cancel(task, stream, id)
  local r = redis.call('HMGET', task, 'status', 'owner', 'cancel')
  local status, owner = r[1], r[2]
  if not status then
    return { 0, 'gone' }
  end
  if FINAL[status] then
    return { 0, status }
  end
  if not r[3] then
    redis.call('HSET', task, 'cancel', now_ms())
  end
  local live = owner and redis.call('EXISTS', 'penstock:lease:' .. owner) == 1
  if live then
    redis.pcall('PUBLISH', 'penstock:control:' .. owner, 'cancel ' .. id)
  elseif status ~= 'submitting' then
    redis.call('HDEL', task, 'claim', 'owner')
    finalise(task, stream, id, 'cancelled', '[]', 'null', prompt_used(task), 0)
    status = 'cancelled'
  end
  if not FINAL[status] then -- if its worker dies first, or it is sent to a queue without workers, EXPIRE ends it
    redis.call('ZADD', 'penstock:deadlines', now_ms(), id)
  end
  return { 1, status }
end
