-- Fair turns among tenants: virtual token counters, as in "Fairness in Serving Large Language Models" (OSDI 2024).
-- Messages that arrive in a list L are sorted by tenant; the least served tenant, in tokens by weight, is next. Each L:
--   penstock:sorted:L  zset, number of arrival -> { number, message, id, tenant, counts (0, 1), n, tokens, prefix,
--                      has an order key (0, 1), and if it was passed over (_placement.lua): since when it is left (ms),
--                      how many have overtaken it, to whom it is left }, packed
--   penstock:turn:L:T  zset, the numbers of tenant T's waiting messages (the empty name: of messages without a tenant)
--   penstock:turns:L   zset, tenant -> its served tokens by weight, of tenants with waiting messages
--   penstock:rested:L  zset, the same of tenants without waiting messages, while it is more than the least of the
--                      others
-- A tenant that returns starts at the least of those who wait: a rest saves nothing up.
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

-- `entries` have arrived, in this order
local function place(list, entries)
  local turns, rested = 'penstock:turns:' .. list, 'penstock:rested:' .. list
  local sorted, tenants, own = {}, {}, {}
  for _, e in ipairs(entries) do
    local number, tenant = e[1], e[4]
    sorted[#sorted + 1], sorted[#sorted + 2] = number, cmsgpack.pack(e)
    if not own[tenant] then
      tenants[#tenants + 1], own[tenant] = tenant, {}
    end
    local numbers = own[tenant]
    numbers[#numbers + 1], numbers[#numbers + 2] = number, number
  end
  redis.call('ZADD', 'penstock:sorted:' .. list, unpack(sorted))
  for _, tenant in ipairs(tenants) do
    redis.call('ZADD', 'penstock:turn:' .. list .. ':' .. tenant, unpack(own[tenant]))
    if not redis.call('ZSCORE', turns, tenant) then
      local served = tonumber(redis.call('ZSCORE', rested, tenant) or '0')
      redis.call('ZADD', turns, math.max(served, least_served(list) or 0), tenant)
      redis.call('ZREM', rested, tenant)
    end
  end
end

-- The part of a tenant's turn that this call has read, oldest first. Taken messages stay in the sorted sets until
-- `take_out`: a call for each of them would be half of FETCH's time.
local lines, taken = {}, {}
-- the number of the tenant's oldest message, or of the one after so many; nil: it has none
local function oldest(list, tenant, after)
  lines[list] = lines[list] or {}
  local line = lines[list][tenant] or { at = 1, size = 2 }
  lines[list][tenant] = line
  local place = line.at + (after or 0)
  while not line[place] do
    local from = #line
    local more = redis.call('ZRANGE', 'penstock:turn:' .. list .. ':' .. tenant, from, from + line.size - 1)
    for _, number in ipairs(more) do
      line[#line + 1] = number
    end
    if #more < line.size then
      break
    end
    line.size = line.size * 2
  end
  return line[place]
end

-- takes a message of the tenant that `oldest` gave, and adds its charge; `take_out` must follow
local function serve(list, tenant, number, charge)
  local turns, line = 'penstock:turns:' .. list, lines[list][tenant]
  taken[list] = taken[list] or {}
  table.insert(taken[list], number)
  if tonumber(line[line.at]) == number then
    line.at = line.at + 1
  else -- of what stands behind the oldest, ranks in the turn stay those of the line
    for place = line.at + 1, #line do
      if tonumber(line[place]) == number then
        table.remove(line, place)
        break
      end
    end
    redis.call('ZREM', 'penstock:turn:' .. list .. ':' .. tenant, number)
  end
  local served = redis.call('ZINCRBY', turns, charge, tenant)
  if not oldest(list, tenant) then
    redis.call('ZREM', turns, tenant)
    redis.call('ZADD', 'penstock:rested:' .. list, served, tenant)
  end
end

local function take_out()
  for list, numbers in pairs(taken) do
    table.sort(numbers)
    local first
    for k, number in ipairs(numbers) do
      first = first or number
      if numbers[k + 1] ~= number + 1 then -- the end of a row of numbers that are all taken
        redis.call('ZREMRANGEBYSCORE', 'penstock:sorted:' .. list, first, number)
        first = nil
      end
    end
    for tenant, line in pairs(lines[list]) do
      if line.at > 1 then
        redis.call('ZREMRANGEBYRANK', 'penstock:turn:' .. list .. ':' .. tenant, 0, line.at - 2)
      end
    end
    forget_rested(list)
  end
end

-- Corrects the charge of delivery `e` (as FETCH entered it) to `used` tokens. No tenant falls below the least served
-- one by that, and charges before a rest count no more.
local function correct(e, used)
  local list, tenant, charge, weight = e[2], e[9], e[10], e[11]
  if not tenant or used == charge then -- no tenant: an entry of an earlier release
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
