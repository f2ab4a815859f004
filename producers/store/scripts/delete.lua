#!lua flags=allow-oom
-- DELETE(nonce) | a record that is no line of a batch: it, its stream and its blocks are gone, it leaves every index,
-- and with it go the rows of its events, its Idempotency-Key's entry and its Celery result; its bytes are counted no
-- more, but for its id's, as long as that is kept. A task that is not final is cancelled first, in the same script, so that its readers get an end; nothing is told
-- to webhooks. No record: nothing.
-- A live owner is told to stop. Whatever it, a message or a sweeper still does finds no record: APPEND and FINISH say
-- `gone`, CLAIM says `done`. What is deleted stays so: a key with the id alone keeps ADMIT from making it again, and
-- CLAIM of a plain message, for as long as a late request or message may come.
-- What is not in this store (dead letters) is the sweeper's: the id enters an index.
-- Its copy for another version, and what scores its output, goes with it, cancelled first if it has not ended.
-- KEYS: task, stream   ARGV: id, nonce of this call, least time for which the id is kept (s), the same of plain tasks
-- Answers: {the status before} | {mine} (this call came before, and its reply was lost) | {gone}
--          {batch, its id} (a line of it: nothing is done)
-- A parent's chunks go with it: each that has not ended is cancelled first, so that the ledger has its row. A chunk alone
-- is none that could be deleted: {gone}.
-- include: _final.lua
-- include: _result.lua
-- include: _kept.lua

-- Forgets the rows of a task that is deleted, whether they are due, delivered or dead. Whoever tries one at this moment
-- finds none afterwards.
local function forget_rows(task)
  for name in string.gmatch(redis.call('HGET', task, 'rows') or '', '%S+') do
    local row = 'penstock:webhooks:row:' .. name
    local source, state, tenant = unpack(redis.call('HMGET', row, 'source', 'state', 'tenant'))
    if state == 'due' and not source then
      outbox_waits(tenant, -1)
    end
    outbox_left(name, tenant)
    redis.call('UNLINK', row)
    for _, place in ipairs({ 'webhooks:due', 'webhooks:delivered', 'webhooks:dead' }) do
      redis.call('ZREM', 'penstock:' .. place, name)
    end
    if source then
      redis.call('ZREM', 'penstock:replies:' .. source, name)
    end
  end
end

local task, stream, id = KEYS[1], KEYS[2], ARGV[1]
local erased = 'penstock:erased:' .. id
local r = redis.call('HMGET', task, 'status', 'owner', 'batch', 'tenant', 'idempotency', 'created', 'plain', 'written',
  'parent', 'shadow', 'shadow_of')
if not r[1] or r[9] then
  return { redis.call('GET', erased) == ARGV[2] and 'mine' or 'gone' }
end
if r[3] then
  return { 'batch', r[3] }
end
if not FINAL[r[1]] then
  if r[2] and redis.call('EXISTS', 'penstock:lease:' .. r[2]) == 1 then
    redis.pcall('PUBLISH', 'penstock:control:' .. r[2], 'cancel ' .. id)
  end
  finalise(task, stream, id, 'cancelled', '[]', 'null', prompt_used(task), 0, true)
end
local ttl = tonumber(ARGV[r[7] and 4 or 3])
if r[5] then
  local at = tonumber(redis.call('HGET', r[5], 'at') or nil)
  if at and at <= (tonumber(r[6]) or 0) then -- else the key has lapsed, and stands for another request
    ttl = math.max(ttl, redis.call('TTL', r[5]))
    redis.call('UNLINK', r[5])
  end
end
local function drop(chunk, name)
  local status, owner = unpack(redis.call('HMGET', chunk, 'status', 'owner'))
  if owner and redis.call('EXISTS', 'penstock:lease:' .. owner) == 1 then
    local control = 'penstock:control:' .. owner
    redis.pcall('PUBLISH', control, 'cancel ' .. name)
  end
  if status and not FINAL[status] then
    finalise(chunk, 'penstock:stream:' .. name, name, 'cancelled', '[]', 'null', prompt_used(chunk), 0, true)
  end
  redis.call('UNLINK', chunk, 'penstock:stream:' .. name)
  drop_result(name)
  for _, index in ipairs({ 'submitting', 'deadlines', 'settled', 'unsettled' }) do
    redis.call('ZREM', 'penstock:' .. index, name)
  end
  if status == 'failed' or owner then -- it may have left a dead letter, or leave one yet
    redis.call('ZADD', 'penstock:erasing', now_ms(), name)
  end
end
chunks_each(id, 0, tonumber(r[8] or nil) or 0, drop)
for _, kind in ipairs(r[10] and { '', 'score:0:', 'score:1:' } or {}) do
  local copy = 'shadow:' .. kind .. id
  if redis.call('HGET', 'penstock:task:' .. copy, 'shadow_of') == id then
    kept_gone('penstock:task:' .. copy)
    drop('penstock:task:' .. copy, copy)
    redis.call('ZREM', 'penstock:shadows:open', copy)
  end
end
if r[11] then
  redis.call('ZREM', 'penstock:shadows:open', id)
end
forget_rows(task)
kept_gone(task)
redis.call('UNLINK', task, stream)
drop_result(id)
for _, index in ipairs({ 'submitting', 'deadlines', 'unsettled', 'settled', 'readers', 'tasks', 'requests',
  'waiting:parents' }) do
  redis.call('ZREM', 'penstock:' .. index, id)
end
if r[4] then
  local tasks, requests = 'penstock:tasks:' .. r[4], 'penstock:requests:' .. r[4]
  redis.call('ZREM', tasks, id)
  redis.call('ZREM', requests, id)
  if redis.call('EXISTS', tasks, requests) == 0 then
    redis.call('SREM', 'penstock:tenants', r[4])
  end
end
redis.call('SET', erased, ARGV[2], 'EX', ttl)
kept_id(r[4], id, now_ms(), ttl)
redis.call('ZADD', 'penstock:erasing', now_ms(), id)
redis.pcall('UNLINK', 'celery-task-meta-' .. id) -- a user without this key leaves it to the sweeper
return { r[1] }
