#!lua flags=no-writes
-- QUEUE_POSITION(task) | how many messages of its tier go before a waiting one; reads only.
-- Lists and turns are searched by the time of submission, which rises along them except for returned messages: so the
-- neighbours of the position are searched for the id. Turns among tenants are estimated, not played: a message comes
-- after those of each tenant that will have been served less by then, if these have the average size of a sample.
-- The tenants of an unsorted list's messages are estimated from samples, or from the caller's counts, if those are of
-- about these messages.
-- KEYS: delayed, weights, returned, list ...
-- ARGV: id, tenant, at (ms), tokens, delayed messages to search at most, then the caller's counts: the share of the
--       tenant's messages that came before, and their tokens on average ('': unknown), messages of all queues by tenant
--       (JSON)
-- Answers: {waiting, messages ahead, exact 0|1, KV tokens that those may need, the incarnation that it is left to
--          (_placement.lua), if it is} | {delayed, ms until it is due} | {} if it does not wait
local delayed, weights = KEYS[1], KEYS[2]
local id, tenant, at, tokens = ARGV[1], ARGV[2], tonumber(ARGV[3]), math.max(tonumber(ARGV[4]), 1)
local NEAR, BLOCKS, BLOCK, SIZES, TENANTS, FEW, USUAL, OWN, BEFORE = 128, 16, 8, 256, 200, 32, 4, 64, 256

-- id, time of submission, tenant and tokens of a message
local function read(raw)
  local fine, m = pcall(cjson.decode, raw)
  local headers = fine and type(m) == 'table' and m.headers
  if type(headers) ~= 'table' then
    return nil, nil, '', 1
  end
  local said = type(headers.penstock) == 'table' and headers.penstock or {}
  local size = type(said.tokens) == 'number' and said.tokens or 1
  return headers.id, type(said.at) == 'number' and said.at, type(said.tenant) == 'string' and said.tenant or '', size
end

-- the index of the message among `count`, from 0; `get(i)` returns message i
local function search(count, get)
  local low, high = 0, count
  while low < high do
    local middle = math.floor((low + high) / 2)
    local _, its = read(get(middle))
    if its and its < at then
      low = middle + 1
    else
      high = middle
    end
  end
  for distance = 0, NEAR do
    for _, i in ipairs({ low + distance, low - distance }) do
      if i >= 0 and i < count and read(get(i)) == id then
        return i
      end
    end
  end
end

local alike = redis.call('HLEN', weights) == 0 -- most systems give no weights

local function weight(of)
  local said = tonumber(not alike and redis.call('HGET', weights, of) or '1')
  return said and said >= 0.001 and said <= 1000 and said or 1
end

-- the tokens of `looked` of a tenant's `count` oldest sorted messages, spread over them
local function sizes(list, name, count, looked)
  local turn, sum = 'penstock:turn:' .. list .. ':' .. name, 0
  for one = 1, looked do
    local place = math.floor((one - 1) * count / looked)
    local number = redis.call('ZRANGE', turn, place, place)[1]
    local packed = redis.call('ZRANGEBYSCORE', 'penstock:sorted:' .. list, number, number)[1]
    sum = sum + math.max(cmsgpack.unpack(packed)[7], 1)
  end
  return sum
end

-- the sorted messages of a list: tenant -> {served, messages, tokens of the sample, its size, weight, tenants that it
-- represents}, of the caller and of others spread over their order; and the number of tenants
local function sorted(list)
  local turns, all, some, every, each = 'penstock:turns:' .. list, {}, {}, 0, 0
  local count = redis.call('ZCARD', turns)
  local most = math.min(count, TENANTS)
  for k = 0, most - 1 do
    local place = math.floor(k * count / most)
    local found = redis.call('ZRANGE', turns, place, place, 'WITHSCORES')
    some[found[1]] = found[2]
  end
  some[tenant] = redis.call('ZSCORE', turns, tenant) or nil
  for name, served in pairs(some) do
    local length = redis.call('ZCARD', 'penstock:turn:' .. list .. ':' .. name)
    local looked = math.min(length, name == tenant and OWN or math.max(4, math.floor(SIZES / most)))
    local sum = sizes(list, name, length, looked)
    all[name] = { tonumber(served), length, sum, looked, weight(name), count / most }
    every, each = every + sum, each + looked
  end
  for name, its in pairs(all) do -- few messages are a poor sample: those of all tenants count, too
    if name ~= tenant and each > 0 then
      its[3], its[4] = its[3] + USUAL * every / each, its[4] + USUAL
    end
  end
  return all, count
end

-- the average charge of a message of the tenant
local function charge(its)
  return its[4] > 0 and its[3] / its[4] / its[5] or tokens / its[5]
end

-- messages of others that go before the one with `own` of its tenant's before it, and the tokens of these others. size:
-- the average tokens of its tenant's, if known
local function before(all, own, size)
  local its = all[tenant]
  local then_served, total, sum = its[1] + own * (size and size / its[5] or charge(its)), 0, 0
  for name, its in pairs(all) do
    if name ~= tenant then
      local turns = (then_served - its[1]) / charge(its)
      turns = name < tenant and math.floor(turns) + 1 or math.ceil(turns) -- if equally served, the names decide
      local count = its[6] * math.max(0, math.min(its[2], turns))
      total, sum = total + count, sum + count * charge(its) * its[5]
    end
  end
  return total, sum
end

-- the incarnation that a sorted message is left to, for 50 ms; or empty
local function left_to(list, turn, place)
  local number = redis.call('ZRANGE', turn, place, place)[1]
  local e = cmsgpack.unpack(redis.call('ZRANGEBYSCORE', 'penstock:sorted:' .. list, number, number)[1])
  local t = redis.call('TIME')
  return e[12] and t[1] * 1000 + t[2] / 1000 < e[10] + 50 and e[12] or ''
end

local function in_turn(list)
  local turn = 'penstock:turn:' .. list .. ':' .. tenant
  local place = search(redis.call('ZCARD', turn), function(i)
    local number = redis.call('ZRANGE', turn, i, i)[1]
    local packed = redis.call('ZRANGEBYSCORE', 'penstock:sorted:' .. list, number, number)[1]
    return packed and cmsgpack.unpack(packed)[2] or ''
  end)
  if place then
    local all, count = sorted(list)
    local looked = math.min(place, BEFORE)
    local size = looked > 0 and sizes(list, tenant, place, looked) / looked
    local others, theirs = before(all, place, size)
    local sum = math.floor(place * (size or 0) + theirs + 0.5)
    return { 'waiting', place + others, count == 1 and 1 or 0, sum, left_to(list, turn, place) }
  end
end

-- adds to each tenant its share of the messages `from` to `to` of a list, from 0, estimated from blocks of them;
-- returns the caller's share
local function add(all, list, from, to)
  local count, seen, own = to - from, {}, 0
  local blocks = math.min(BLOCKS, math.ceil(count / BLOCK))
  for k = 0, blocks - 1 do
    local first = from + math.floor(k * count / blocks)
    for _, raw in ipairs(redis.call('LRANGE', list, -math.min(first + BLOCK, to), -1 - first)) do
      seen[#seen + 1] = raw
    end
  end
  for _, raw in ipairs(seen) do
    local _, _, name, size = read(raw)
    local its = all[name] or { 0, 0, 0, 0, weight(name), 1 }
    its[2], its[3], its[4], all[name] = its[2] + count / #seen / its[6], its[3] + math.max(size, 1), its[4] + 1, its
    own = own + (name == tenant and count / #seen or 0)
  end
  return own
end

-- all tenants of a list, by the caller's counts; and the tenant's messages that came before. Nil if many of the counted
-- messages wait elsewhere
local function counted(list, length, place, sampled)
  local turns, all, total, sorted_sum, sum, looked = 'penstock:turns:' .. list, {}, 0, 0, 0, 0
  local tenants = 0
  for _, its in pairs(sampled) do
    sum, looked = sum + its[3], looked + its[4]
  end
  local scores, found = {}, redis.call('ZRANGE', turns, 0, -1, 'WITHSCORES')
  for k = 1, #found, 2 do
    scores[found[k]] = found[k + 1]
  end
  local usual = looked > 0 and sum / looked or tokens
  for name, waiting in pairs(cjson.decode(ARGV[8])) do
    local served, its = scores[name], sampled[name]
    local known = its and its[4] >= 4
    local have = served and redis.call('ZCARD', 'penstock:turn:' .. list .. ':' .. name) or 0
    all[name] = { tonumber(served or 0), waiting, known and its[3] or usual, known and its[4] or 1,
      weight(name), 1, have }
    tenants, total, sorted_sum = tenants + 1, total + waiting, sorted_sum + have
  end
  local scale = math.min((length + sorted_sum) / math.max(total, 1), 1)
  if not all[tenant] or scale < (tenants <= FEW and 0.9 or 0.5) then -- samples are as good with few tenants
    return nil
  end
  for _, its in pairs(all) do
    its[2] = math.max(its[7], its[2] * scale)
  end
  local its = all[tenant]
  local came = tonumber(ARGV[6])
  local own = came and its[2] * came or its[7] + (its[2] - its[7]) * place / length
  return all, math.max(its[7], math.min(own, its[2] - 1))
end

local function in_list(list)
  local length = redis.call('LLEN', list)
  local place = search(length, function(i)
    return redis.call('LINDEX', list, -1 - i)
  end)
  if not place then
    return nil
  end
  local all = sorted(list)
  local own = all[tenant] and all[tenant][2] or 0
  local number = redis.call('HGET', KEYS[3], id)
  if number then -- a returned message keeps its number
    own = redis.call('ZCOUNT', 'penstock:turn:' .. list .. ':' .. tenant, '-inf', '(' .. number)
  else -- as if the whole list were sorted: sorting is faster than taking
    own = own + add(all, list, 0, place)
    add(all, list, place, length)
    local of_all, of_own = counted(list, length, place, all)
    if of_all then
      all, own = of_all, of_own
    end
  end
  all[tenant] = all[tenant] or { 0, 0, 0, 0, weight(tenant), 1 }
  local least, tenants = nil, 0
  for _, its in pairs(all) do
    least, tenants = its[1] > 0 and math.min(least or its[1], its[1]) or least, tenants + 1
  end
  for _, its in pairs(all) do -- new tenants start at the least of those who wait
    its[1] = math.max(its[1], least or 0)
  end
  local size = tonumber(ARGV[7])
  local others, theirs = before(all, own, size)
  local mine = own * (size or charge(all[tenant]) * all[tenant][5])
  return { 'waiting', math.floor(own + others + 0.5), tenants == 1 and 1 or 0, math.floor(mine + theirs + 0.5) }
end

for k = 4, #KEYS do
  local found = in_turn(KEYS[k]) or in_list(KEYS[k])
  if found then
    return found
  end
end
local t = redis.call('TIME')
local found = redis.call('ZRANGE', delayed, 0, ARGV[5] - 1, 'WITHSCORES')
for k = 1, #found, 2 do
  if read(cmsgpack.unpack(found[k])[2]) == id then
    return { 'delayed', math.max(0, math.floor(found[k + 1] - t[1] * 1000 - t[2] / 1000)) }
  end
end
return {}
