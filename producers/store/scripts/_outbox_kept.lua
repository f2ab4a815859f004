-- Shared by _outbox.lua and the scripts that change a row's state. A tenant's deliveries are bounded, so that no receiver
-- that always fails fills the store: of MOST_DUE webhooks that are due, a further one is dead at once, and may be
-- replayed as any other; of MOST_ENDED that are delivered, or dead, the oldest goes for a new one.
-- `penstock:webhooks:waiting` counts the due ones by tenant, in the script that changes the state; a release before it
-- counted none, so TRIM forgets the counts when nothing is due. `penstock:webhooks:<state>:<tenant>` are the tenant's part
-- of `penstock:webhooks:<state>`.
local MOST_DUE, MOST_ENDED = 100000, 10000
local OUTBOX_TTL = 3456000 -- 40 days: longer than any row is kept

-- Counts a webhook more that is due, or one less.
local function outbox_waits(tenant, by)
  if redis.call('HINCRBY', 'penstock:webhooks:waiting', tenant or '', by) <= 0 then
    redis.call('HDEL', 'penstock:webhooks:waiting', tenant or '')
  end
end

local function outbox_own(state, tenant)
  return 'penstock:webhooks:' .. state .. ':' .. (tenant or '')
end

-- Enters a row that is delivered, or dead.
local function outbox_ended(state, name, tenant, now)
  local all, own = 'penstock:webhooks:' .. state, outbox_own(state, tenant)
  redis.call('ZADD', all, now, name)
  redis.call('ZADD', own, now, name)
  redis.call('EXPIRE', own, OUTBOX_TTL)
  while redis.call('ZCARD', own) > MOST_ENDED do
    local old = redis.call('ZPOPMIN', own)[1]
    if redis.call('HGET', 'penstock:webhooks:row:' .. old, 'state') == state then
      redis.call('UNLINK', 'penstock:webhooks:row:' .. old)
    end
    redis.call('ZREM', all, old)
  end
end

-- A row is neither delivered nor dead any more.
local function outbox_left(name, tenant)
  redis.call('ZREM', outbox_own('delivered', tenant), name)
  redis.call('ZREM', outbox_own('dead', tenant), name)
end

-- Enters a webhook that is due now. Answers: whether it is; false: too many of its tenant are, and it is dead.
local function outbox_due(row, name, tenant, at_s, now)
  if tonumber(redis.call('HGET', 'penstock:webhooks:waiting', tenant or '') or 0) >= MOST_DUE then
    local said = '[{"at":' .. at_s .. ',"latency_ms":0,"error":"not tried: ' .. MOST_DUE .. ' of this tenant are due"}]'
    redis.call('HSET', row, 'state', 'dead', 'attempts', said)
    outbox_ended('dead', name, tenant, now)
    return false
  end
  redis.call('ZADD', 'penstock:webhooks:due', now, name)
  outbox_waits(tenant, 1)
  return true
end
