-- Shared by ADMIT, BATCH_EXPAND, CLAIM, RELEASE and _final.lua. It counts the tasks that wait
-- (`producers/store/waiting.py`). A record's `waits` says that it is counted, and as what: `<kind> <tokens> <queue>`.
-- It changes in the script that changes the counts, so no death leaves one without the other. `result_bytes`: of a
-- record whose task generates nothing. They count beside its tokens, in the same measure (TOKEN_BYTES of _memory.lua).
local function waiting_add(waits, tenant, key, by, result_bytes)
  local kind, tokens, queue = string.match(waits, '^(%S+) (%d+) (.*)$')
  local function add(hash, field, number)
    if redis.call('HINCRBY', hash, field, number) <= 0 then
      redis.call('HDEL', hash, field)
    end
  end
  add('penstock:waiting', kind, by)
  add('penstock:waiting', kind .. ' ' .. queue, by)
  add('penstock:waiting:tokens', kind .. ' ' .. queue, by * tokens)
  if result_bytes then
    add('penstock:waiting:tokens', 'results', by * math.ceil(result_bytes / 8))
  end
  -- Scripts of a release that knows no results do not count them down.
  if by < 0 and redis.call('EXISTS', 'penstock:waiting') == 0 then
    redis.call('HDEL', 'penstock:waiting:tokens', 'results')
  end
  if kind ~= 'line' then
    add('penstock:waiting:tenants', tenant or '', by)
    if key then
      add('penstock:waiting:keys', key, by)
    end
  end
  return queue, tokens
end

-- Counts a task, if it is not counted yet.
local function wait_begins(task)
  local r = redis.call('HMGET', task, 'waits', 'origin', 'tier', 'tokens', 'queue', 'tenant', 'key', 'result_bytes')
  if r[1] or r[2] == 'shadow' then -- a copy, which is dropped before it makes anybody wait
    return
  end
  local kind = r[2] == 'batch' and 'line' or string.match(r[3] or '', '^%w+$') or 'default'
  local tokens = tonumber(r[4] or '0') or 0
  tokens = tokens >= 1 and tokens < 1e9 and tokens or 0 -- of a plain task, it may be anything
  local waits = string.format('%s %d %s', kind, tokens, r[5] or '')
  redis.call('HSET', task, 'waits', waits)
  waiting_add(waits, r[6], r[7], 1, tonumber(r[8] or nil))
end

-- Counts a task no more, if it is counted. started: a worker takes it, which shows how fast its queue drains.
local function wait_ends(task, started)
  local r = redis.call('HMGET', task, 'waits', 'tenant', 'key', 'result_bytes')
  if not r[1] then
    return
  end
  redis.call('HDEL', task, 'waits')
  local queue, tokens = waiting_add(r[1], r[2], r[3], -1, tonumber(r[4] or nil))
  if started then
    redis.call('HINCRBY', 'penstock:drain:' .. queue, 'started', tokens)
    redis.call('EXPIRE', 'penstock:drain:' .. queue, 3600)
  end
end
