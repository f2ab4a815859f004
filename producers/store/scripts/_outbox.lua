-- include: _endpoints.lua
-- include: _outbox_kept.lua
-- Shared by _final.lua, CLAIM, and the script that ends a batch. It writes an event into the outbox: a row for each
-- destination that wants it (`producers/store/outbox.py` has the format). Call it in the script that makes the event
-- true, so that nobody ever sees one without the other. Called again for the same event, it changes nothing.
--
--   -- include: _outbox.lua
--   outbox_event('batch.completed', batch, created, { tenant = ..., model = ..., webhook = ..., secret = ... })
--
-- event: its type. object: what `data.id` says. created: the object's time of creation, as its record has it, so that
-- an id that is used again has events of its own. of: what the object is; each field may be absent (nil or false):
-- tenant, model; restored (it is from a backup); webhook (JSON) and secret of its own; reply (JSON, `producers.sources.messages.replies`); plain (a
-- Celery task that no client sent).
-- A webhook or an endpoint that cannot be read gets nothing: it must keep no task from its end. A task's record has the
-- names of its rows (`rows`).
local function outbox_wants(json, types, event, default)
  local fine, hook = pcall(cjson.decode, json)
  if not fine or type(hook) ~= 'table' or type(hook.url) ~= 'string' then
    return nil
  end
  if type(hook[types]) ~= 'table' then
    return default and hook
  end
  for _, one in ipairs(hook[types]) do
    if one == event then
      return hook
    end
  end
end

-- The endpoints that may want it, of `count`: {id, JSON, ...}. Those of other tenants are not looked at.
local function outbox_endpoints(count, tenant)
  endpoints_indexed(count)
  local sets = { ENDPOINTS .. ':of:' }
  if tenant then
    sets[2] = ENDPOINTS .. ':of:' .. tenant
  end
  return endpoints_in(sets)
end

-- source: of a reply, the source whose processes send it; false: a webhook. Returns the name of a new row.
local function outbox_row(name, fields, of, source)
  local row = 'penstock:webhooks:row:' .. name
  if redis.call('EXISTS', row) == 1 then
    return
  end
  for _, field in ipairs({ 'tenant', 'model', 'restored' }) do
    if of[field] then
      fields[#fields + 1] = field
      fields[#fields + 1] = of[field]
    end
  end
  local t = redis.call('TIME')
  redis.call('HSET', row, 'at', t[1], 'state', 'due', unpack(fields))
  local now = t[1] * 1000 + math.floor(t[2] / 1000)
  if source then
    redis.call('SADD', 'penstock:replies', source)
    redis.call('ZADD', 'penstock:replies:' .. source, now, name)
  elseif not outbox_due(row, name, of.tenant, t[1], now) then
    return name
  end
  redis.pcall('PUBLISH', 'penstock:webhooks:wake', source or '')
  return name
end

-- Returns the names of the rows that it wrote.
local function outbox_event(event, object, created, of)
  local own = of.webhook and outbox_wants(of.webhook, 'events', event, event ~= 'response.in_progress')
  local reply = of.reply and outbox_wants(of.reply, 'events', event, event ~= 'response.in_progress')
  local endpoints = redis.call('HLEN', 'penstock:webhooks:endpoints')
  if not own and not reply and endpoints == 0 then -- most tasks: nobody is to be told
    return {}
  end
  local names = {}
  local webhook = 'evt_' .. redis.sha1hex(object .. ':' .. created .. ':' .. event)
  if own then
    local fields = { 'webhook_id', webhook, 'type', event, 'object', object, 'url', own.url }
    if of.secret then
      fields[9], fields[10] = 'secret', of.secret
    end
    names[1] = outbox_row(webhook .. '.own', fields, of)
  end
  if reply and type(reply.source) == 'string' then
    local fields = { 'webhook_id', webhook, 'type', event, 'object', object, 'url', reply.url, 'source', reply.source,
      'reply', of.reply }
    names[#names + 1] = outbox_row(webhook .. '.reply', fields, of, reply.source)
  end
  local all = endpoints > 0 and outbox_endpoints(endpoints, of.tenant) or {}
  for i = 1, #all, 2 do
    local asks = string.find(all[i + 1], event, 1, true) -- cheaper than decoding
    local to = asks and outbox_wants(all[i + 1], 'event_types', event)
    local mine = to and (to.tenant == cjson.null or to.tenant == of.tenant)
    if mine and to.enabled ~= false and (to.celery == true or not of.plain) then
      local fields = { 'webhook_id', webhook, 'type', event, 'object', object, 'url', to.url, 'endpoint', all[i] }
      names[#names + 1] = outbox_row(webhook .. '.' .. all[i], fields, of)
    end
  end
  return names
end

-- The event that a task's record has this status: of tasks and background responses, and of plain Celery tasks. A
-- response that was cut at its length is `incomplete`, as its callers see it.
local function outbox_task(task, id, status)
  local r = redis.call('HMGET', task, 'origin', 'plain', 'created', 'tenant', 'model', 'webhook', 'webhook_secret',
    'reasons', 'reply', 'restored')
  if r[1] == 'response' and status == 'completed' and r[8] == '["length"]' then
    status = 'incomplete'
  end
  if r[1] == 'task' or r[1] == 'response' or r[2] then
    local object = r[1] == 'response' and 'resp_' .. id or id
    local of = { plain = r[2], tenant = r[4], model = r[5], webhook = r[6], secret = r[7], reply = r[9],
      restored = r[10] }
    local names = outbox_event('response.' .. status, object, r[3] or '', of)
    if names[1] then
      local before = redis.call('HGET', task, 'rows')
      redis.call('HSET', task, 'rows', (before and before .. ' ' or '') .. table.concat(names, ' '))
    end
  end
end
