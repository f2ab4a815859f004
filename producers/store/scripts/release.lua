#!lua flags=allow-oom
-- RELEASE(c) | claim = c: the claim is cleared, also of a final unsettled task; `queued` if not final: it waits again.
-- Counts no death.
-- A task whose message goes to the dead letters, as its record or stream is broken, ends: `failed`, or `cancelled` if a
-- cancel was accepted, with all that an end has; so does one that nobody holds, as CLAIM failed. What keeps it from that
-- is mended first, as far as it can be. Celery has its part already, so it is settled. The reason is noted, as by SETTLE.
-- Whoever follows it (FOLLOW) is told: a worker of the release before, which may go on, knows the task's own channel alone.
-- Why an unfinished task was given back is kept, for the first 32 times, with the number and time of its start.
-- KEYS: task, stream
-- ARGV: claim, why ('': not kept), error (JSON: its message goes to the dead letters; or empty), run (_run.lua), the
--       dead letter's reason, default TTL (seconds) of a task that is settled
-- Answers: 1 released | 0
-- include: _final.lua
-- include: _run.lua
-- include: _settle.lua
-- Replaces that of which no end could be made: numbers that are none, as what the task waits, what was charged for it,
-- and a stream that is none.
local function mend(task, stream)
  local names, n = { 'discarded', 'prompt_tokens', 'created', 'started', 'offset', 'texts', 'n' }, 1
  local others = #names
  for choice = 0, 63 do
    names[#names + 1] = 'next:' .. choice
  end
  local values = redis.call('HMGET', task, unpack(names))
  for k = #names, 1, -1 do
    n = values[k] and math.max(n, k - others) or n -- as many choices as have tokens
    if values[k] and not tonumber(values[k]) then
      redis.call('HSET', task, names[k], names[k] == 'n' and n or 0)
    end
  end
  local counted = redis.call('HMGET', task, 'waits', 'reserved')
  if counted[1] and not string.match(counted[1], '^%S+ %d+ .*$') then
    redis.call('HDEL', task, 'waits')
  end
  local fine, charged = pcall(charged_for, task, counted[2])
  if counted[2] and not (fine and type(charged) == 'table' and type(charged.accounts) == 'table'
    and tonumber(charged.tokens) and tonumber(charged.estimate)) then
    redis.call('HDEL', task, 'reserved')
  end
  local length = redis.pcall('XLEN', stream)
  if type(length) == 'table' and string.find(length.err, 'WRONGTYPE', 1, true) then
    redis.call('UNLINK', stream)
  end
end
local r = redis.call('HMGET', KEYS[1], 'status', 'claim', 'owner', 'given_back', 'claims', 'began', 'cancel')
if not r[1] or r[2] ~= ARGV[1] and (r[2] or FINAL[r[1]] or ARGV[3] == '') then
  return 0
end
local id = string.sub(KEYS[1], #'penstock:task:' + 1)
if ARGV[3] ~= '' then
  note_run(KEYS[1], ARGV[4])
  mend(KEYS[1], KEYS[2])
  local final, err = 'failed', ARGV[3]
  if r[7] then
    final, err = 'cancelled', 'null'
  end
  local fine, why = FINAL[r[1]], ''
  if not fine then
    fine, why = pcall(function()
      finalise(KEYS[1], KEYS[2], id, final, '[]', err, prompt_used(KEYS[1]), 0)
    end)
  end
  if not fine then
    why = type(why) == 'table' and why.err or tostring(why)
    if string.find(why, 'ACL failure', 1, true) then -- an operator's fault: its worker asks again
      error(why)
    end
    redis.call('HSET', KEYS[1], 'status', final, 'end', final, 'finished', now_ms(), 'reasons', '[]',
      'usage', '{"prompt_tokens":0,"cached_tokens":0,"output_tokens":0}', 'error', err)
    redis.call('ZREM', 'penstock:deadlines', id)
    pcall(wait_ends, KEYS[1])
  end
  redis.call('HSET', KEYS[1], 'letter', ARGV[5])
  settle(KEYS[1], KEYS[2], id, ARGV[6])
  return 1
end
redis.call('HDEL', KEYS[1], 'claim', 'owner')
note_run(KEYS[1], ARGV[4])
if FINAL[r[1]] then
  return 1
end
redis.call('HSET', KEYS[1], 'status', 'queued')
local followers = redis.call('HGET', KEYS[1], 'followers')
if followers then
  tell_followers(followers, { id, '' })
end
wait_begins(KEYS[1])
if ARGV[2] ~= '' then
  local fine, before = pcall(cjson.decode, r[4] or '[]')
  if fine and type(before) == 'table' and #before < 32 then
    local now, entries = now_ms(), redis.call('XLEN', KEYS[2])
    before[#before + 1] = { owner = r[3] or '', at = now, entries = entries, why = ARGV[2],
      start = tonumber(r[5] or '0'), began = tonumber(r[6] or nil) }
    redis.call('HSET', KEYS[1], 'given_back', cjson.encode(before))
  end
end
return 1
