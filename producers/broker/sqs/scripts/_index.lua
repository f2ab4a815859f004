-- The index: what should be in SQS and is not in flight. Of each list L:
--   penstock:sqs:waiting:L  zset, 'ID N TOKENS AT TENANT' (the same for all copies of a message) -> ms since when it waits,
--                           which is AT where that is said, or ms from when on it is received, which is later than now
--   penstock:sqs:tenants:L  hash, tenant (the empty name: of those that name none) -> its entries
local function clock()
  local t = redis.call('TIME')
  return t[1] * 1000 + math.floor(t[2] / 1000)
end

local function said(member) -- at, tenant
  local at, tenant = string.match(member, '^%S+ %S+ %S+ (%S+) (.*)$')
  return tonumber(at) or 0, tenant or ''
end

-- It waits, from `due` (ms) on; one that waits already stays as it is. Answers whether it is new.
local function enter(list, member, now, due)
  local at, tenant = said(member)
  local score = due and due > now and due or at > 0 and math.min(at, now) or now
  if redis.call('ZADD', 'penstock:sqs:waiting:' .. list, 'NX', score, member) == 0 then
    return false
  end
  redis.call('HINCRBY', 'penstock:sqs:tenants:' .. list, tenant, 1)
  return true
end

-- It does not wait any more. Answers whether it did.
local function leave(list, member)
  if redis.call('ZREM', 'penstock:sqs:waiting:' .. list, member) == 0 then
    return false
  end
  local _, tenant = said(member)
  if redis.call('HINCRBY', 'penstock:sqs:tenants:' .. list, tenant, -1) <= 0 then
    redis.call('HDEL', 'penstock:sqs:tenants:' .. list, tenant)
  end
  return true
end
