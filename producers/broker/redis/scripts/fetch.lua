#!lua flags=allow-oom
-- FETCH(inc, uuid) | broker lease alive; the caller names the UUID; already in flight: same answer; else take + enter
-- in flight (a message that cannot be decoded: dead letter).
-- First it sorts arrived messages by tenant, so many of each list; the next call sorts more. A list's head is then the
-- oldest message of the least served tenant (see _fair.lua), which is charged an estimate here; ACK, BACK and REAP
-- correct it.
-- Takes up to one message per named UUID, best list first: a list's rank is its tier less one for every `ageing` ms
-- that its head has waited unserved, so that a lower tier never starves. A head that does not fit its tier's credit is
-- left in its list, as are all messages of its own and of lower tiers; higher tiers go on.
-- A suspect (one more return and it is condemned) had company whenever its worker died, and most of that company is
-- innocent: an incarnation holds one suspect at a time, so that whatever kills its workers condemns itself alone. Its
-- tenant waits with it; others do not.
-- An incarnation that places takes of a tenant's first messages the one of which it holds the longest prefix, and leaves
-- for a moment what another is to have (see _placement.lua).
-- KEYS: lease, in flight of inc, delayed, dead, reaped, unserved, returned, arrivals, weights, list ...
-- ARGV: ageing (ms), N redeliveries, capacity in sequences, capacity in tokens, tokens of a plain task that
--       generates, messages of
--       a list to sort (at most 1,000: Lua passes no more than some thousands of arguments), inc if it places or
--       empty, ms for which a message is left, sequence credit * 4 tiers, token credit * 4 tiers, rank (0-3) of each
--       list ..., uuid ...
-- Answers: {lost}; else for each message: uuid, list, message, redeliveries; `condemned` instead of N of them: its
-- workers died before they could claim it, so that it must be claimed by its id before anyone decodes it.
-- Last, for each new dead letter: empty, list, message, reason; and, if messages were left to others: three times empty,
-- after how many ms to look again.
-- include: producers.connection/_now.lua
-- include: _fair.lua
-- include: _placement.lua
local lease, inflight, delayed, dead, reaped, unserved = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5], KEYS[6]
local returned, arrivals, weights, before = KEYS[7], KEYS[8], KEYS[9], 9
local nlists = #KEYS - before
if redis.call('EXISTS', lease) == 0 then
  return { 'lost' }
end
local now = now_ms()
local ageing, limit = tonumber(ARGV[1]), tonumber(ARGV[2])
local cap_seqs, cap_tokens, plain_tokens, bite = tonumber(ARGV[3]), tonumber(ARGV[4]), tonumber(ARGV[5]), ARGV[6]
local seqs, tokens = {}, {}
for k = 0, 3 do
  seqs[k], tokens[k] = tonumber(ARGV[9 + k]), tonumber(ARGV[13 + k])
end
local placing = begin_placing(ARGV[7], now, ARGV[8])
local out, buried = {}, {}

-- names of tasks that generate nothing: plain Celery's have all their texts in their bodies
local of_texts = {
  ['penstock.embed'] = true,
  ['penstock.rerank'] = true,
  ['penstock.score'] = true,
  ['penstock.classify'] = true,
  ['penstock.token_classify'] = true,
}

-- a size from a header; 0 if it is not a number, or not above 0 (as NaN, which cjson accepts)
local function whole(value)
  return type(value) == 'number' and math.floor(value) or 0
end

local weighs = {}
local function weight_of(tenant)
  if not weighs[tenant] then
    local weight = tonumber(redis.call('HGET', weights, tenant) or '1')
    weighs[tenant] = weight and weight >= 0.001 and weight <= 1000 and weight or 1
  end
  return weighs[tenant]
end

local counted, none = {}, redis.call('EXISTS', reaped) == 0
local function returns(id)
  counted[id] = none and 0 or counted[id] or tonumber(redis.call('HGET', reaped, id) or '0')
  return counted[id]
end

local function suspect(id)
  local n = returns(id)
  return n > 0 and n >= limit - 1
end

local entering = {} -- UUIDs and entries that enter flight
local function enter()
  if entering[1] then
    redis.call('HSET', inflight, unpack(entering))
    entering = {}
  end
end

local function holds_suspect()
  enter()
  for _, packed in ipairs(redis.call('HVALS', inflight)) do
    if suspect(cmsgpack.unpack(packed)[3]) then
      return true
    end
  end
  return false
end

local function give(uuid, list, raw, id, tier, need_seqs, need_tokens)
  local n, k = returns(id), #out
  out[k + 1], out[k + 2], out[k + 3] = uuid, list, raw
  out[k + 4] = n >= limit and 'condemned' or tostring(n)
  for t = tier, 3 do
    seqs[t], tokens[t] = seqs[t] - need_seqs, tokens[t] - need_tokens
  end
end

-- due messages that were given back with a delay go to the fronts of their lists, the first due one to the very front
local due = redis.call('ZRANGEBYSCORE', delayed, '-inf', now, 'LIMIT', 0, 100)
for i = #due, 1, -1 do
  local e = cmsgpack.unpack(due[i])
  redis.call('RPUSH', e[1], e[2])
  redis.call('ZREM', delayed, due[i])
end

-- sorts messages at the front of a list by tenant; those that cannot be decoded become dead letters
local function sort(list)
  local entries, ids, fresh = {}, {}, {}
  for _, raw in ipairs(redis.call('RPOP', list, math.min(bite, 1000)) or {}) do
    local fine, m = pcall(cjson.decode, raw)
    local reason
    if not fine then
      reason = 'not JSON'
    elseif type(m) ~= 'table' then
      reason = 'not a JSON object'
    elseif type(m.properties) ~= 'table' then
      reason = 'no properties'
    elseif type(m.properties.delivery_info) ~= 'table' then
      reason = 'no delivery_info'
    elseif type(m.headers) ~= 'table' or type(m.headers.id) ~= 'string' or m.headers.id == ''
        or type(m.headers.task) ~= 'string' then
      reason = 'no task id and name in the headers'
    elseif type(m.body) ~= 'string' then
      reason = 'no body'
    end
    if reason then
      redis.call('RPUSH', dead, cjson.encode({ reason = reason, list = list, at = now, message = raw }))
      buried[#buried + 1] = { '', list, raw, reason }
    else
      local id, said = m.headers.id, type(m.headers.penstock) == 'table' and m.headers.penstock or {}
      local task, tokens = m.headers.task, whole(said.tokens)
      local counts = (task == 'penstock.generate' or of_texts[task]) and 1 or 0
      if of_texts[task] and not (tokens > 0) then
        tokens = math.ceil(#m.body / 4) -- base64 of three bytes, an estimated token
      end
      local tenant = type(said.tenant) == 'string' and said.tenant or ''
      ids[#ids + 1] = id
      local keyed = type(said.order_key) == 'string' and said.order_key ~= '' and 1 or 0
      local prefix = prefix_of(said.prefix)
      entries[#entries + 1] = { 0, raw, id, tenant, counts, whole(said.n), tokens, prefix, keyed }
    end
  end
  if not ids[1] then
    return
  end
  for k, number in ipairs(redis.call('HMGET', returned, unpack(ids))) do
    if number and redis.call('HDEL', returned, ids[k]) == 1 then -- a returned message keeps its number
      entries[k][1] = tonumber(number)
    else
      fresh[#fresh + 1] = entries[k]
    end
  end
  local before_them = fresh[1] and redis.call('INCRBY', arrivals, #fresh) - #fresh
  for k, e in ipairs(fresh) do
    e[1] = before_them + k
  end
  place(list, entries)
end

-- a sorted message of list k, by its number
local messages = {}
local function message(k, number)
  local list = KEYS[before + k]
  if messages[list .. number] then
    return messages[list .. number]
  end
  local e = cmsgpack.unpack(redis.call('ZRANGEBYSCORE', 'penstock:sorted:' .. list, number, number)[1])
  local m = { number = e[1], raw = e[2], id = e[3], tenant = e[4], list = list, tier = tonumber(ARGV[16 + k]) }
  m.entry, m.prefix, m.keyed, m.seqs, m.tokens = e, e[8] or '', e[9] == 1, 0, 0
  if e[5] == 1 then
    m.seqs = math.min(e[6] > 0 and e[6] or 1, cap_seqs)
    m.tokens = math.min(e[7] > 0 and e[7] or plain_tokens, cap_tokens)
  end
  messages[list .. number] = placing and m
  return m
end

-- the head of list k: the oldest message of the least served tenant that is not `passed` over
local passed, passes = {}, {}
local function pass(k, tenant)
  passed[k] = passed[k] or {}
  passed[k][tenant], passes[k] = true, (passes[k] or 0) + 1
end
local waits = redis.call('HMGET', unserved, unpack(KEYS, before + 1)) -- since when each list's head has waited
local function head(k)
  local list, tenant = KEYS[before + k], nil
  for _, name in ipairs(redis.call('ZRANGE', 'penstock:turns:' .. list, 0, passes[k] or 0)) do
    if not (passed[k] and passed[k][name]) then
      tenant = name
      break
    end
  end
  if not tenant then
    if not passes[k] and waits[k] then
      redis.call('HDEL', unserved, list)
      waits[k] = false
    end
    return nil
  end
  local since = tonumber(waits[k])
  if not since or since > now then -- later than now: the clock was set back
    since = now
    redis.call('HSET', unserved, list, now)
  end
  waits[k] = since
  local h = message(k, oldest(list, tenant))
  h.rank = h.tier - math.floor((now - since) / ageing)
  return h
end

local leaves = 0 -- heads that this call has left
-- Of the head's tenant the message to take: of those behind it the one of which most is held here, and more than of the
-- head; or if the head is left to a holder (_placement.lua), the one of which most is. None goes before the head that is
-- to be left itself. Else the head; nil: all are left.
local function choose(k, h)
  if h.keyed or overtaken(h) >= COUNT then
    return h
  end
  local here, other = held(h)
  local left, best, most = leaves < LEAVES and other and patience(h) > 0, nil, nil
  if not left and not holds_some() then
    return h
  end
  for after = 1, WINDOW - 1 do
    local number = oldest(h.list, h.tenant, after)
    local m = number and message(k, number)
    if not m or m.keyed then
      break
    end
    if m.seqs <= seqs[m.tier] and m.tokens <= tokens[m.tier] and not suspect(m.id) then
      local its, elsewhere = held(m)
      if not elsewhere and (left or its > here) and (not best or its > most) then
        best, most = m, its
      end
    end
  end
  if left or best then
    pass_over(h, best, left and other)
  end
  if left and not best then
    leaves = leaves + 1
    pass(k, h.tenant)
  end
  return best or not left and h or nil
end

for k = 1, nlists do
  sort(KEYS[before + k])
end
local heads, blocked = {}, 4
local busy, order, needed = nil, nil, 0
local first = 17 + nlists
local flying = ARGV[first] and redis.call('HMGET', inflight, unpack(ARGV, first))
for u = first, #ARGV do
  local uuid, known = ARGV[u], flying[u - first + 1]
  if known then
    local e = cmsgpack.unpack(known)
    give(uuid, e[2], e[4], e[3], e[5], e[6], e[7]) -- takes credit, too: the caller does not know this delivery yet
  else
    if not busy then
      busy, order = {}, tonumber(redis.call('GET', 'penstock:deliveries') or '0')
      for k = 1, nlists do
        heads[k] = head(k)
        busy[#busy + 1] = heads[k] and k or nil
      end
    end
    local best
    repeat
      best = nil
      for _, k in ipairs(busy) do
        local h = heads[k]
        if h and h.tier < blocked and (not best or h.rank < heads[best].rank
            or (h.rank == heads[best].rank and h.tier < heads[best].tier)) then
          best = k
        end
      end
      if best and (heads[best].seqs > seqs[heads[best].tier] or heads[best].tokens > tokens[heads[best].tier]) then
        blocked = heads[best].tier
        best = blocked > 0 and -1 or nil
      elseif best and suspect(heads[best].id) and holds_suspect() then
        pass(best, heads[best].tenant)
        heads[best] = head(best)
        best = -1
      elseif best and placing then
        local chosen = choose(best, heads[best])
        heads[best] = chosen or head(best)
        best = chosen and best or -1
      end
    until best ~= -1
    if not best then
      break
    end
    local h = heads[best]
    local charge, weight = math.max(h.tokens, 1), weight_of(h.tenant)
    serve(h.list, h.tenant, h.number, charge / weight)
    if waits[best] ~= now then
      redis.call('HSET', unserved, h.list, now)
      waits[best] = now
    end
    order = order + 1
    local entry = { order, h.list, h.id, h.raw, h.tier, h.seqs, h.tokens, h.number, h.tenant, charge, weight }
    entering[#entering + 1], entering[#entering + 2] = uuid, cmsgpack.pack(entry)
    give(uuid, h.list, h.raw, h.id, h.tier, h.seqs, h.tokens)
    needed = needed + h.tokens
    heads[best] = head(best)
  end
end
enter()
take_out()
if order then
  redis.call('SET', 'penstock:deliveries', order)
end
if needed > 0 then
  redis.call('INCRBY', 'penstock:deliveries:tokens', needed)
end
if placing then
  say_room(seqs, tokens)
end
for _, told in ipairs(buried) do
  for k = 1, 4 do
    out[#out + 1] = told[k]
  end
end
if look_again then
  out[#out + 1], out[#out + 2], out[#out + 3], out[#out + 4] = '', '', '', tostring(look_again)
end
return out
