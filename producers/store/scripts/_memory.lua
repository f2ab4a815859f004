-- Shared by ADMIT, BATCH_EXPAND, APPEND and PROMPT. How full this server is, and who may still write what
-- (`docs/run/servers.md`). INFO takes as long as ADMIT itself, so that a look counts for 50 ms (without `maxmemory` for
-- a second); what was admitted since is added to it. What waits will have results: each of its KV tokens counts 8
-- bytes, which is more than a token of a compacted stream takes, and beside these its `result_bytes` count.
local MEMORY, LOOK_MS, TOKEN_BYTES = 'penstock:waiting:memory', 50, 8
-- What a task takes beside its fields: its record, its message, and its places in indexes.
local TASK_BYTES = 1000
-- The share of `maxmemory` up to which tasks of a tier are admitted, and lines of batches made. The rest is for what
-- was accepted.
local ADMITTED = { priority = 0.9, default = 0.85, flex = 0.75, batch = 0.65, line = 0.6 }
-- The share up to which a tier's tokens are written. It is beyond the bound, which others may have filled.
local WRITTEN = { priority = 1.1, default = 1.06, flex = 1.04, batch = 1.02 }
local memory

-- Looks, or takes an earlier look.
local function look(now)
  if memory then
    return memory
  end
  local r = redis.call('HMGET', MEMORY, 'at', 'used', 'limit', 'waits', 'more')
  local at, limit = tonumber(r[1] or nil), tonumber(r[3] or nil)
  if at and limit and now >= at and now - at < (limit > 0 and LOOK_MS or 1000) then
    memory = { used = tonumber(r[2]), limit = limit, waits = tonumber(r[4]), more = tonumber(r[5]) }
    return memory
  end
  local info = redis.pcall('INFO', 'memory')
  info = type(info) == 'string' and info or '' -- a user who may not ask knows no bound
  local function number(name)
    return tonumber(string.match(info, '\n' .. name .. ':(%d+)') or '0')
  end
  local tokens = 0
  for _, count in ipairs(redis.call('HVALS', 'penstock:waiting:tokens')) do
    tokens = tokens + count
  end
  memory = { used = math.max(0, number('used_memory') - number('mem_not_counted_for_evict')),
    limit = number('maxmemory'), waits = TOKEN_BYTES * tokens, more = 0 }
  redis.call('HSET', MEMORY, 'at', now, 'used', string.format('%.0f', memory.used),
    'limit', string.format('%.0f', memory.limit), 'waits', string.format('%.0f', memory.waits), 'more', 0)
  redis.call('EXPIRE', MEMORY, 60)
  return memory
end

-- Reserves what a task of these fields and KV tokens takes. Answers: nil | {storage, bytes in use and promised, the
-- most for its tier}, and nothing is reserved.
local function reserve(kind, fields, tokens, now)
  local m = look(now)
  if m.limit == 0 then
    return nil
  end
  local bytes = TASK_BYTES + TOKEN_BYTES * (tonumber(tokens or nil) or 0)
  for i, part in ipairs(fields) do
    bytes = bytes + #tostring(part)
    if i % 2 == 1 and part == 'result_bytes' then
      bytes = bytes + (tonumber(fields[i + 1]) or 0)
    end
  end
  local taken, most = m.used + m.waits + m.more, math.floor(m.limit * (ADMITTED[kind] or ADMITTED.default))
  if taken + bytes > most then
    return { 'storage', taken, most }
  end
  m.more = m.more + bytes
  if 2 * taken > m.limit then -- far from the bound, the next look is soon enough
    redis.call('HINCRBY', MEMORY, 'more', bytes)
  end
end

-- Whether tokens of a task may still be written: those of all tiers up to the lowest bound.
local function may_write(task, now)
  local m = look(now)
  if m.limit == 0 or m.used <= m.limit * WRITTEN.batch then
    return true
  end
  return m.used <= m.limit * (WRITTEN[redis.call('HGET', task, 'tier')] or WRITTEN.default)
end
