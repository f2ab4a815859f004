-- The index: what should be in SQS and is not in flight. Of each list L, which the set penstock:sqs:lists names:
--   penstock:sqs:waiting:L  zset, 'ID N TOKENS TENANT' (a function of the task) -> ms since when it waits; later than
--                           now: it is delayed until then
--   penstock:sqs:tenants:L  hash, tenant (the empty name: of those that name none) -> its entries
-- Every script that changes it does so by `enter` and `leave`.
-- include: producers.connection/_now.lua
local function tenant_of(member)
  return string.match(member, '^%S+ %S+ %S+ (.*)$') or ''
end

-- It waits since `at` (ms), or is delayed until `due`, if that is given. One that waits already stays as it is. Answers
-- whether it is new.
local function enter(list, member, at, due)
  redis.call('SADD', 'penstock:sqs:lists', list)
  if redis.call('ZADD', 'penstock:sqs:waiting:' .. list, 'NX', due or at, member) == 0 then
    return false
  end
  redis.call('HINCRBY', 'penstock:sqs:tenants:' .. list, tenant_of(member), 1)
  return true
end

-- It does not wait any more. Answers whether it did.
local function leave(list, member)
  if redis.call('ZREM', 'penstock:sqs:waiting:' .. list, member) == 0 then
    return false
  end
  local tenants, tenant = 'penstock:sqs:tenants:' .. list, tenant_of(member)
  if redis.call('HINCRBY', tenants, tenant, -1) <= 0 then
    redis.call('HDEL', tenants, tenant)
  end
  return true
end
