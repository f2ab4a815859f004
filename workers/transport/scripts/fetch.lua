-- FETCH(inc, uuid) | broker lease alive; the caller names the UUID; already in flight: same answer; else pop + enter in
-- flight (what cannot be decoded: dead letter).
-- Takes up to one message per named UUID, best list first: a list's rank is its tier less one for every `ageing` ms that
-- its head has waited unserved, so that a lower tier never starves. A head that does not fit its tier's credit is left where
-- it is, and so is all of its own and of lower tiers; higher tiers go on.
-- A suspect (one more return and it is condemned) had company whenever its worker died, and most of that company is
-- innocent: an incarnation holds one suspect at a time, so that whatever kills its workers condemns itself alone.
-- KEYS: lease, in flight of inc, delayed, dead, reaped, unserved, list ...
-- ARGV: ageing (ms), N redeliveries, capacity in sequences, capacity in tokens, tokens of a plain task,
--       sequence credit * 4 tiers, token credit * 4 tiers, rank (0-3) of each list ..., uuid ...
-- Answers: {lost}; else for each message: uuid, list, message, redeliveries. At N of them it says `condemned`: its
-- workers died of it before they could claim, so that it must be claimed by its id before anyone decodes it.
-- Last, for each message that was dead-lettered: nothing, list, message, reason.
local lease, inflight, delayed, dead, reaped, unserved = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5], KEYS[6]
local nlists = #KEYS - 6
if redis.call('EXISTS', lease) == 0 then
  return { 'lost' }
end
local t = redis.call('TIME')
local now = t[1] * 1000 + math.floor(t[2] / 1000)
local ageing, limit = tonumber(ARGV[1]), tonumber(ARGV[2])
local cap_seqs, cap_tokens, plain_tokens = tonumber(ARGV[3]), tonumber(ARGV[4]), tonumber(ARGV[5])
local seqs, tokens = {}, {}
for k = 0, 3 do
  seqs[k], tokens[k] = tonumber(ARGV[6 + k]), tonumber(ARGV[10 + k])
end
local out, buried = {}, {}

-- a size from a header: sane, or the default (cjson lets NaN through, which compares with nothing)
local function bounded(value, default, cap)
  if type(value) ~= 'number' or not (value >= 1) then
    value = default
  end
  return math.min(math.floor(value), cap)
end

local function returns(id)
  return tonumber(redis.call('HGET', reaped, id) or '0')
end

local function suspect(id)
  local n = returns(id)
  return n > 0 and n >= limit - 1
end

local function holds_suspect()
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

-- what was sent back with a delay, and is due, goes to the front of its list, what was due first to the very front
local due = redis.call('ZRANGEBYSCORE', delayed, '-inf', now, 'LIMIT', 0, 100)
for i = #due, 1, -1 do
  local e = cmsgpack.unpack(due[i])
  redis.call('RPUSH', e[1], e[2])
  redis.call('ZREM', delayed, due[i])
end

-- the head of list k, decoded; what cannot be decoded is dead-lettered on the way
local function head(k)
  local list = KEYS[6 + k]
  while true do
    local raw = redis.call('LINDEX', list, -1)
    if not raw then
      redis.call('HDEL', unserved, list)
      return nil
    end
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
    elseif type(m.headers) ~= 'table' or type(m.headers.id) ~= 'string' or type(m.headers.task) ~= 'string' then
      reason = 'no task id and name in the headers'
    elseif type(m.body) ~= 'string' then
      reason = 'no body'
    end
    if not reason then
      local since = tonumber(redis.call('HGET', unserved, list))
      if not since or since > now then -- later than now: the clock was set back
        since = now
        redis.call('HSET', unserved, list, now)
      end
      local h = { raw = raw, id = m.headers.id, list = list, tier = tonumber(ARGV[13 + k]) }
      h.rank = h.tier - math.floor((now - since) / ageing)
      h.seqs, h.tokens = 0, 0
      if m.headers.task == 'penstock.generate' then
        local size = type(m.headers.penstock) == 'table' and m.headers.penstock or {}
        h.seqs = bounded(size.n, 1, cap_seqs)
        h.tokens = bounded(size.tokens, plain_tokens, cap_tokens)
      end
      return h
    end
    redis.call('RPOP', list)
    redis.call('RPUSH', dead, cjson.encode({ reason = reason, list = list, at = now, message = raw }))
    buried[#buried + 1] = { '', list, raw, reason }
  end
end

local heads, blocked = {}, 4
local read = false
for u = 14 + nlists, #ARGV do
  local uuid = ARGV[u]
  local known = redis.call('HGET', inflight, uuid)
  if known then
    local e = cmsgpack.unpack(known)
    give(uuid, e[2], e[4], e[3], e[5], e[6], e[7]) -- its credit too: the caller does not know yet that it holds this
  else
    if not read then
      read = true
      for k = 1, nlists do
        heads[k] = head(k)
      end
    end
    local best
    repeat
      best = nil
      for k = 1, nlists do
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
        heads[best] = nil
        best = -1
      end
    until best ~= -1
    if not best then
      break
    end
    local h = heads[best]
    redis.call('RPOP', h.list)
    redis.call('HSET', unserved, h.list, now)
    local entry = { redis.call('INCR', 'penstock:deliveries'), h.list, h.id, h.raw, h.tier, h.seqs, h.tokens }
    redis.call('HSET', inflight, uuid, cmsgpack.pack(entry))
    give(uuid, h.list, h.raw, h.id, h.tier, h.seqs, h.tokens)
    heads[best] = head(best)
  end
end
for _, told in ipairs(buried) do
  for k = 1, 4 do
    out[#out + 1] = told[k]
  end
end
return out
