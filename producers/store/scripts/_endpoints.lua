-- Shared by _outbox.lua, SWAP and ENDPOINTS. Webhook endpoints by tenant, so that no event looks at those of others: the
-- set `penstock:webhooks:endpoints:of:<tenant>` has the ids of a tenant's endpoints, that of '' those without a tenant.
-- `penstock:webhooks:endpoints:indexed` is how many endpoints the sets have. If there are more or fewer, somebody who
-- knows no sets (an earlier release) has changed them, and what is missing is added. An id of no endpoint may stay.
local ENDPOINTS = 'penstock:webhooks:endpoints'

-- Sees to it that the sets have all endpoints, of which there are `count`.
local function endpoints_indexed(count)
  if tonumber(redis.call('GET', ENDPOINTS .. ':indexed') or 0) == count then
    return
  end
  local all = redis.call('HGETALL', ENDPOINTS)
  for i = 1, #all, 2 do
    local fine, one = pcall(cjson.decode, all[i + 1])
    local tenant = fine and type(one) == 'table' and one.tenant
    if tenant == cjson.null or type(tenant) == 'string' then
      redis.call('SADD', ENDPOINTS .. ':of:' .. (tenant == cjson.null and '' or tenant), all[i])
    end
  end
  redis.call('SET', ENDPOINTS .. ':indexed', count)
end

-- The endpoints of these sets: {id, JSON, ...}.
local function endpoints_in(sets)
  local ids, found = redis.call('SUNION', unpack(sets)), {}
  local values = #ids > 0 and redis.call('HMGET', ENDPOINTS, unpack(ids)) or {}
  for i, json in ipairs(values) do
    if json then
      found[#found + 1] = ids[i]
      found[#found + 1] = json
    end
  end
  return found
end
