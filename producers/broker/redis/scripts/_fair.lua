-- Fair turns among tenants: virtual token counters, as in "Fairness in Serving Large Language Models" (OSDI 2024).
-- What arrives in a list L is sorted by tenant; whoever was served least, in tokens by weight, is next. Of each L:
--   penstock:sorted:L  zset, number of arrival -> { number, message, id, tenant, generates (0, 1), n, tokens }, packed
--   penstock:turn:L:T  zset, the numbers of what waits of tenant T (the empty name: of those that name none)
--   penstock:turns:L   zset, tenant -> what it was served, of those of whom something waits
--   penstock:rested:L  zset, the same of those of whom nothing waits, as long as it is more than the least of the others'
-- Who comes back from a rest begins with the least of those who wait: a rest saves nothing up.
local function least_served(list)
  return tonumber(redis.call('ZRANGE', 'penstock:turns:' .. list, 0, 0, 'WITHSCORES')[2])
end

local function forget_rested(list)
  local least = least_served(list)
  if least then
    redis.call('ZREMRANGEBYSCORE', 'penstock:rested:' .. list, '-inf', least)
  else
    redis.call('DEL', 'penstock:rested:' .. list)
  end
end

local function place(list, e)
  local number, tenant = e[1], e[4]
  local turns, rested = 'penstock:turns:' .. list, 'penstock:rested:' .. list
  redis.call('ZADD', 'penstock:sorted:' .. list, number, cmsgpack.pack(e))
  redis.call('ZADD', 'penstock:turn:' .. list .. ':' .. tenant, number, number)
  if not redis.call('ZSCORE', turns, tenant) then
    local served = tonumber(redis.call('ZSCORE', rested, tenant) or '0')
    redis.call('ZADD', turns, math.max(served, least_served(list) or 0), tenant)
    redis.call('ZREM', rested, tenant)
  end
end

-- take out what has this number, and note that its tenant is served so much more; `forget_rested` is to follow
local function serve(list, tenant, number, charge)
  local turns, turn = 'penstock:turns:' .. list, 'penstock:turn:' .. list .. ':' .. tenant
  redis.call('ZREMRANGEBYSCORE', 'penstock:sorted:' .. list, number, number)
  redis.call('ZREM', turn, number)
  local served = redis.call('ZINCRBY', turns, charge, tenant)
  if redis.call('EXISTS', turn) == 0 then
    redis.call('ZREM', turns, tenant)
    redis.call('ZADD', 'penstock:rested:' .. list, served, tenant)
  end
end

-- Delivery `e` (as FETCH entered it) took `used` tokens: what it was charged more is given back, but nobody comes to
-- stand better by that than whoever was served least, and what was charged before a rest is over with it.
local function correct(e, used)
  local list, tenant, charge, weight = e[2], e[9], e[10], e[11]
  if not tenant or used == charge then -- none: an earlier release's
    return
  end
  local more = (used - charge) / weight
  for _, key in ipairs({ 'penstock:turns:' .. list, 'penstock:rested:' .. list }) do
    local served = tonumber(redis.call('ZSCORE', key, tenant))
    if served then
      local least = math.min(served, least_served(list) or 0)
      redis.call('ZADD', key, math.max(least, served + more), tenant)
    end
  end
  forget_rested(list)
end
