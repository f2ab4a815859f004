-- Shared by ADMIT, _settle.lua and DELETE. It counts the bytes of a tenant's tasks that are in the store, in the script
-- that changes them. A record's `kept` says what is counted of it: `<bytes>`, and once its
-- time to live has begun `<bytes> <end>`. Bytes whose end has come count no more, so nobody has to see a record expire.
-- The id that DELETE keeps of a task counts in the record's place until its own end.
local KEPT_TTL = 5356800 -- 62 days: longer than any task's time to live

local function kept_of(tenant)
  return 'penstock:kept:' .. (tenant or '')
end

local function kept_add(kept, bytes)
  if redis.call('HINCRBY', kept, 'total', bytes) < 0 then -- somebody removed the counts meanwhile
    redis.call('HSET', kept, 'total', 0)
  end
  redis.call('EXPIRE', kept, KEPT_TTL)
end

-- Takes out the bytes whose end has come.
local function kept_lapse(kept, now)
  local first = redis.call('HGET', kept, 'next')
  if not first or tonumber(first) * 1000 > now then
    return
  end
  local all, over, next_end = redis.call('HGETALL', kept), 0, nil
  for i = 1, #all, 2 do
    local at = tonumber(all[i])
    if at and at * 1000 <= now then
      over = over + tonumber(all[i + 1])
      redis.call('HDEL', kept, all[i])
    elseif at then
      next_end = math.min(next_end or at, at)
    end
  end
  if next_end then
    redis.call('HSET', kept, 'next', next_end)
  else
    redis.call('HDEL', kept, 'next')
  end
  kept_add(kept, -over)
end

-- Counts a new record of these fields and values, and the result that it is to have. Answers: its `kept`
local function kept_begins(kept, fields)
  local bytes = 0
  for i, part in ipairs(fields) do
    bytes = bytes + #tostring(part)
    if i % 2 == 1 and part == 'result_bytes' then
      bytes = bytes + (tonumber(fields[i + 1]) or 0)
    end
  end
  kept_add(kept, bytes)
  return bytes
end

-- These bytes, which are in the total, go in `ttl` seconds. Ends are rounded up, so that there are few of them.
-- Answers: their end
local function kept_until(kept, bytes, now, ttl)
  local step = ttl <= 3600 and 60 or ttl <= 86400 and 900 or 21600
  local at = math.ceil((now / 1000 + ttl + 60) / step) * step
  redis.call('HINCRBY', kept, at, bytes)
  local first = redis.call('HGET', kept, 'next')
  if not first or tonumber(first) > at then
    redis.call('HSET', kept, 'next', at)
  end
  return at
end

-- The record and its stream go in `ttl` seconds: each entry of the stream counts 32 bytes, and that is when all of them
-- count no more. A task that did not complete has no result, whose bytes count no more.
local function kept_ends(task, stream, now, ttl)
  local r = redis.call('HMGET', task, 'kept', 'tenant', 'status', 'result_bytes')
  local bytes = tonumber(r[1] or nil)
  if not bytes then
    return
  end
  local kept, more = kept_of(r[2]), 32 * redis.call('XLEN', stream)
  if r[3] ~= 'completed' then
    more = more - (tonumber(r[4] or nil) or 0)
  end
  kept_add(kept, more)
  local at = kept_until(kept, bytes + more, now, ttl)
  redis.call('HSET', task, 'kept', string.format('%.0f %.0f', bytes + more, at))
end

-- The id of a deleted task is kept for `ttl` seconds: a key of its own, of some 120 bytes and the id.
local function kept_id(tenant, id, now, ttl)
  local kept, bytes = kept_of(tenant), 120 + #id
  kept_add(kept, bytes)
  kept_until(kept, bytes, now, ttl)
end

-- The record goes now.
local function kept_gone(task)
  local r = redis.call('HMGET', task, 'kept', 'tenant')
  local bytes, at = string.match(r[1] or '', '^(%d+) ?(%d*)$')
  if not bytes then
    return
  end
  local kept = kept_of(r[2])
  if at ~= '' then
    if redis.call('HEXISTS', kept, at) == 0 then
      return
    end
    if redis.call('HINCRBY', kept, at, -bytes) <= 0 then
      redis.call('HDEL', kept, at)
    end
  end
  kept_add(kept, -bytes)
end
