-- The index: the messages that should be in SQS and are not in flight. The set penstock:sqs:lists has each list L:
--   penstock:sqs:waiting:L  zset, 'ID N TOKENS TENANT' (a function of the task) -> ms since when it waits; later than
--                           now: it is delayed until then
--   penstock:sqs:tenants:L  hash, tenant (the empty name: tasks without one) -> its entries
-- Scripts change it only by `enter` and `leave`.
-- include: producers.connection/_now.lua
local function tenant_of(member)
  return string.match(member, '^%S+ %S+ %S+ (.*)$') or ''
end

-- Enters a message that waits since `at` (ms), or is delayed until `due`, if given. An existing entry stays as it is.
-- Answers whether it is new.
local function enter(list, member, at, due)
  redis.call('SADD', 'penstock:sqs:lists', list)
  if redis.call('ZADD', 'penstock:sqs:waiting:' .. list, 'NX', due or at, member) == 0 then
    return false
  end
  redis.call('HINCRBY', 'penstock:sqs:tenants:' .. list, tenant_of(member), 1)
  return true
end

-- Removes a message that does not wait any more. Answers whether it was there.
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
