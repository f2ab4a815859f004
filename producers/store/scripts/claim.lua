#!lua flags=allow-oom
-- CLAIM(c, inc, plain, pool) | The first rule that applies:
-- 1 own lease gone: `lost`. 2 no record: a plain message creates one, unless that was deleted (DELETE): `erased`; a
-- client's message is `done`.
-- One whose id REVOKE has noted is cancelled. So is a chunk whose parent has ended, or is gone. A parent's message, as
-- of a restored one, is `done`. The first start of a chunk is its parent's.
-- A plain message that its worker cannot read, or whose task needs a later release than the worker's, makes no record
-- while a worker of that lives: `elsewhere`. Nor does one that the model's routing gives to another version, of which a
-- worker lives, or that names another version, which is known, and has a pool or is in the routing.
-- 3 claim = c: repeat the answer. 4 settled: `done`, with the reason to keep the message, if SETTLE noted one.
-- 5 owner live: `busy`, also when final or cancelled.
-- 6 final: take the claim, `settle`. 7 neither cancelled nor late, and `elsewhere`: it was sent to another version, or
-- its stream has an entry and it was started last in another version, or in another pool of which a worker lives; or it
-- needs a later release (its record's `level`).
-- 8 claim set, owner dead: deaths + 1 and stuck + 1; stuck = 0 if the stream has grown since the last `go`. Then 9
-- or 10.
-- 9 cancel, deadline, stuck >= N or deaths >= 4 N, or a message condemned by the broker
-- since every worker died before its CLAIM: finalise with the terminal entry, take the claim, `settle`. A task that was
-- started before is `incomplete` past its deadline. 10 take the claim, `in_progress`, `go(next)`, with the
-- worker's version and pool; the first start of a task is an event. It waits no more.
-- The first 32 owners that died are kept in `lost`, with the number and time of their start. From 8 on, a record that
-- is not marked as queued is marked now.
-- KEYS: task, stream
-- ARGV: id, claim, inc, plain 0|1, N, condemned 0|1, the worker's version, its version's queue, its fingerprint, its
--       level, that which a plain message needs (else 0), then for a plain message field, value, ...
-- Answers: {lost} {done} {erased} {busy}; {done, reason}; {elsewhere, the queue that its message belongs to};
--          {settle, status, field, value, ...}; {go, status, field, value, ...} (the whole record)
-- include: _final.lua
-- include: _late.lua
-- include: producers.connection/_level.lua
-- include: _routing.lua
local task, stream = KEYS[1], KEYS[2]
local id, claim, inc = ARGV[1], ARGV[2], ARGV[3]
local version, queue, fingerprint, level, needs = ARGV[7], ARGV[8], ARGV[9], tonumber(ARGV[10]), tonumber(ARGV[11])
if redis.call('EXISTS', 'penstock:lease:' .. inc) == 0 then
  return { 'lost' }
end
local function answer(kind)
  local out = redis.call('HGETALL', task)
  table.insert(out, 1, redis.call('HGET', task, 'status'))
  table.insert(out, 1, kind)
  return out
end
local r = redis.call('HMGET', task, 'status', 'claim', 'owner', 'settled', 'cancel', 'deadline', 'deaths',
  'claims', 'stuck', 'mark', 'began', 'letter', 'level', 'parent', 'chunks')
-- Where a worker of these pools lives whose release can do what needs this level.
local function lives(pools, need)
  for _, pool in ipairs(pools) do
    for _, worker in ipairs(redis.call('SMEMBERS', 'penstock:workers:' .. pool)) do
      if lives_at(worker, need) then
        return true
      end
    end
  end
end
local function beside(name, need)
  return need > 0 and name .. '+' .. need or name
end
local now, unknown = now_ms(), false
if not r[1] then
  if ARGV[4] ~= '1' then
    return { 'done' }
  end
  if redis.call('EXISTS', 'penstock:erased:' .. id) == 1 then
    return { 'erased' }
  end
  if needs > level and lives(pools_of(queue), needs) then
    return { 'elsewhere', beside(queue, needs) }
  end
  local fields = { 'v', '1', 'status', 'queued', 'plain', '1', 'created', now, 'deaths', 0 }
  local given = {}
  for i = 12, #ARGV, 2 do
    fields[#fields + 1], fields[#fields + 2] = ARGV[i], ARGV[i + 1]
    given[ARGV[i]] = ARGV[i + 1]
  end
  local model, home = given.model or '', 'penstock:queue:' .. (given.model or '') .. '@'
  local routing = routing_of(model)
  local target = given.alias or routing and drawn(routing, id, given) or 'default'
  if target ~= 'default' then
    local to = routing and version_at(routing, target) or target
    unknown = given.alias and routing and archived(routing, to)
    if to ~= version and not unknown then
      if lives(pools_of(home .. to), needs) then
        return { 'elsewhere', beside(home .. to, needs) }
      end
      unknown = given.alias and (redis.call('HEXISTS', 'penstock:versions', model .. '@' .. to) == 0
        or not (routing and routable(routing, to)) and #pools_of(home .. to) == 0)
      if given.alias and not unknown then
        return { 'elsewhere', beside(home .. to, needs) }
      end
    end
  end
  if routing then
    fields[#fields + 1], fields[#fields + 2] = 'generation', routing.generation
  end
  redis.call('HSET', task, unpack(fields))
  redis.call('UNLINK', stream, 'penstock:result:' .. id) -- they outlive the record of an earlier life
  r = { 'queued', false, false, false, false, redis.call('HGET', task, 'deadline'), '0', false, false, false }
  r[13] = redis.call('HGET', task, 'level')
  if tonumber(redis.call('ZSCORE', 'penstock:revoked', id) or 0) > now then
    redis.call('HSET', task, 'cancel', now)
    r[5] = now
  end
  if r[6] then
    redis.call('ZADD', 'penstock:deadlines', r[6], id)
  end
end
if r[15] then
  return { 'done' }
end
local parent = r[14] and 'penstock:task:' .. r[14]
local parent_status = parent and redis.call('HGET', parent, 'status')
if parent and not FINAL[r[1]] and not r[5] and (not parent_status or FINAL[parent_status]) then
  redis.call('HSET', task, 'cancel', now)
  r[5] = now
end
local need = tonumber(r[13] or '0')
local function elsewhere(begun)
  local own = redis.call('HMGET', task, 'version', 'queue', 'fingerprint', 'plain')
  if not own[1] and own[2] then -- an earlier release's: it was sent to a pool
    local pool = redis.call('HGET', 'penstock:pools', own[2])
    own[1] = pool and cjson.decode(pool).version
  end
  if own[1] and own[1] ~= version then
    return (begun or not own[4]) and own[2]
  end
  local pool = begun and own[3] and own[3] ~= fingerprint and queue .. '.' .. own[3]
  if pool and lives({ pool }, need) then
    return beside(pool, need)
  end
  return need > level and beside(queue, need)
end
-- What an earlier worker had computed, and this one computes again or finds in its cache: prompt, and tokens so far.
local function again(length)
  local had = redis.call('HMGET', task, 'prompt_tokens', 'prompt')
  redis.call('HINCRBY', task, 'again', (had[1] or 0) + length - (had[2] or 0))
end
local status, held, owner = r[1], r[2], r[3]
if held == claim then
  return answer(FINAL[status] and 'settle' or 'go')
end
if r[4] then
  return { 'done', r[12] or nil }
end
if held and owner and redis.call('EXISTS', 'penstock:lease:' .. owner) == 1 then
  return { 'busy' }
end
if FINAL[status] then
  redis.call('HSET', task, 'claim', claim, 'owner', inc)
  return answer('settle')
end
local deaths, stuck, length = tonumber(r[7] or '0'), tonumber(r[9] or '0'), redis.call('XLEN', stream)
local is_late = r[6] and tonumber(r[6]) <= now
local home = not r[5] and not is_late and elsewhere(length > 0)
if home then
  return { 'elsewhere', home }
end
if held then
  deaths, stuck = deaths + 1, stuck + 1
  if deaths <= 32 then
    local lost = redis.call('HGET', task, 'lost')
    local one = cjson.encode({ owner = owner or '', at = now, entries = length, start = tonumber(r[8] or '0'),
      began = tonumber(r[11] or nil) })
    redis.call('HSET', task, 'lost', (lost and string.sub(lost, 1, -2) .. ',' or '[') .. one .. ']')
  end
end
if length > tonumber(r[10] or '0') then
  stuck = 0
end
redis.call('HSET', task, 'claim', claim, 'owner', inc, 'deaths', deaths, 'stuck', stuck)
redis.call('HSETNX', task, 'queued', now)
redis.call('ZREM', 'penstock:submitting', id)
if r[5] then
  finalise(task, stream, id, 'cancelled', '[]', 'null', prompt_used(task), 0)
  return answer('settle')
end
local err
local limit = tonumber(ARGV[5])
if is_late then
  late(task, stream, id, r[8])
  return answer('settle')
elseif stuck >= limit or deaths >= 4 * limit then
  err = '{"code":"dead_lettered","message":"Given up: ' .. deaths .. ' workers died while they held this task."}'
elseif unknown then
  err = '{"code":"model_not_found","message":"The model has no such version or alias.","param":"model"}'
elseif ARGV[6] == '1' and not r[8] then
  err = '{"code":"dead_lettered","message":"Given up: every worker that was handed this task died at once."}'
end
if err then
  finalise(task, stream, id, 'failed', '[]', err, prompt_used(task), 0)
  return answer('settle')
end
wait_ends(task, true)
redis.call('HSET', task, 'status', 'in_progress', 'mark', length, 'version', version, 'queue', beside(queue, need),
  'fingerprint', fingerprint, 'began', now)
redis.call('HSETNX', task, 'started', now)
redis.call('HINCRBY', task, 'claims', 1)
if parent_status == 'queued' then
  redis.call('HSET', parent, 'status', 'in_progress', 'started', now, 'claims', 1)
  outbox_task(parent, r[14], 'in_progress')
end
if not r[8] then
  outbox_task(task, id, 'in_progress')
elseif length > 0 then
  again(length)
end
return answer('go')
