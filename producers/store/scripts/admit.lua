#!lua
-- ADMIT | no record -> `submitting`; else nothing. A request older than the submit window is refused, and so is an id
-- whose task was deleted (DELETE), and a task for a version that the model's routing has left meanwhile (ROUTE).
-- The record's field `idempotency` names the entry of the request's Idempotency-Key (IDEMPOTENT): it is marked as made.
-- It enters the index that lists it, and its tenant's own: a task with the `origin` task that of tasks, and others that
-- of requests, which keeps the last MOST. With accounts, they are charged in the same script; if a limit, or a bound on what waits or is kept, is reached, or the server is
-- too full for the task's tier, nothing is written.
-- Its bytes are counted among its tenant's.
-- A task with the field `shadow` is a sample of which a copy is to be made. A copy (`shadow_of`) is made of a task that
-- has a record, and enters the copies that are open; no index lists it.
-- A parent (a record with `chunks`) is `queued` at once: no message announces it, and CHUNKS makes its chunks. It is
-- charged, and counts against the bounds, as all of them together.
-- KEYS: task, submitting, deadlines, then the accounts that are charged
-- ARGV: id, nonce, asked (ms, server time as the client estimates it), window (ms), what the accounts are asked for
--       (JSON, `charge` in _limits.lua), bounds (JSON, `waiting_full`; empty: none), the generation of the routing by
--       which it got its version (0: it had none; empty: it is not looked at), field, value, ...
-- Answers: new | mine (the same request was admitted before, and its reply was lost) | exists | erased | late | rerouted;
--          with accounts, in place of `new`, what `charge` answers (_limits.lua); what `waiting_full` answers; what
--          `reserve` answers (_memory.lua)
-- include: producers.connection/_now.lua
-- include: _limits.lua
-- include: _bounds.lua
-- include: _admit.lua
-- include: _made.lua
-- include: _kept.lua
-- include: _memory.lua
-- include: _routing.lua
local MOST = 10000 -- as producers/store/task_index.py has it
local SAMPLES = 1000 -- more that wait to be copied are left out

local task, submitting = KEYS[1], KEYS[2]
local id, nonce, asked, window = ARGV[1], ARGV[2], tonumber(ARGV[3]), tonumber(ARGV[4])
local now = now_ms()
local known = redis.call('HMGET', task, 'nonce', 'status')
if known[2] then
  return known[1] == nonce and 'mine' or 'exists'
end
if redis.call('EXISTS', 'penstock:erased:' .. id) == 1 then
  return 'erased'
end
if now - asked > window then
  return 'late'
end
local fields = { 'v', '1', 'status', 'submitting', 'nonce', nonce, 'created', now, 'deaths', 0 }
local given = {}
for i = 8, #ARGV, 2 do
  fields[#fields + 1], fields[#fields + 2] = ARGV[i], ARGV[i + 1]
  given[ARGV[i]] = ARGV[i + 1]
end
local copied = given.shadow_of
if copied and redis.call('EXISTS', 'penstock:task:' .. copied) == 0 then
  return 'erased'
end
local tenant, tier, tokens, chunks = given.tenant, given.tier, given.tokens, tonumber(given.chunks or nil)
if ARGV[7] ~= '' then
  local base = string.match(given.queue, '^penstock:queue:(.+)@')
  local generation = redis.call('HGET', 'penstock:routing:' .. base, 'generation')
  if generation and generation ~= ARGV[7] and not routable(routing_of(base), given.version) then
    return 'rerouted'
  end
end
if chunks then
  fields[4] = 'queued'
  for _, part in ipairs({ 'queued', now, 'written', 0, 'written_at', now }) do
    fields[#fields + 1] = part
  end
end
local kept = kept_of(tenant)
kept_lapse(kept, now)
local full = ARGV[6] ~= '' and waiting_full(cjson.decode(ARGV[6]), chunks or 1)
full = full or reserve(tier, fields, tokens, now)
if full then
  return full
end
local charged
if KEYS[4] then
  local reserved, shortened
  charged, reserved, shortened = charge({ unpack(KEYS, 4) }, cjson.decode(ARGV[5]), now)
  if charged[1] ~= 'new' then
    return charged
  end
  charged_fields(fields, reserved, shortened)
end
local bytes = kept_begins(kept, fields)
fields[#fields + 1] = 'kept'
fields[#fields + 1] = bytes
admit(task, submitting, KEYS[3], id, now, fields, chunks)
local entry, origin = unpack(redis.call('HMGET', task, 'idempotency', 'origin'))
if entry then
  made(entry)
end
if copied then
  redis.call('ZADD', 'penstock:shadows:open', now, id)
  return charged or 'new'
end
if given.shadow then -- a user without these keys makes no copies
  local samples = redis.pcall('LLEN', 'penstock:shadows')
  if type(samples) == 'number' and samples < SAMPLES then
    redis.call('RPUSH', 'penstock:shadows', id)
  end
end
local index = origin == 'task' and 'penstock:tasks' or 'penstock:requests'
redis.call('ZADD', index, now, id)
if tenant then
  redis.call('ZADD', index .. ':' .. tenant, now, id)
  redis.call('SADD', 'penstock:tenants', tenant)
end
if origin ~= 'task' then
  redis.call('ZREMRANGEBYRANK', index, 0, -MOST - 1)
  if tenant then
    redis.call('ZREMRANGEBYRANK', index .. ':' .. tenant, 0, -MOST - 1)
  end
end
return charged or 'new'
