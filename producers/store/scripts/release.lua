#!lua flags=allow-oom
-- RELEASE(c) | claim = c: the claim is cleared, also of a final unsettled task; `queued` if not final: it
-- waits again, unless it is given up. Counts no death.
-- Whoever follows it (FOLLOW) is told: a worker of the release before, which may go on, knows the task's own channel alone.
-- Why an unfinished task was given back is kept, for the first 32 times, with the number and time of its start.
-- KEYS: task, stream
-- ARGV: claim, why ('': not kept), buried (1: its message goes, so that it waits for nothing), run (_run.lua)
-- Answers: 1 released | 0
-- include: _final.lua
-- include: _run.lua
local r = redis.call('HMGET', KEYS[1], 'status', 'claim', 'owner', 'given_back', 'claims', 'began')
if not r[1] or r[2] ~= ARGV[1] then
  return 0
end
redis.call('HDEL', KEYS[1], 'claim', 'owner')
note_run(KEYS[1], ARGV[4])
if not FINAL[r[1]] then
  redis.call('HSET', KEYS[1], 'status', 'queued')
  local followers = redis.call('HGET', KEYS[1], 'followers')
  if followers then
    tell_followers(followers, { string.sub(KEYS[1], #'penstock:task:' + 1), '' })
  end
  if ARGV[3] ~= '1' then
    wait_begins(KEYS[1])
  end
end
if not FINAL[r[1]] and ARGV[2] ~= '' then
  local fine, before = pcall(cjson.decode, r[4] or '[]')
  if fine and type(before) == 'table' and #before < 32 then
    local now, entries = now_ms(), redis.call('XLEN', KEYS[2])
    before[#before + 1] = { owner = r[3] or '', at = now, entries = entries, why = ARGV[2],
      start = tonumber(r[5] or '0'), began = tonumber(r[6] or nil) }
    redis.call('HSET', KEYS[1], 'given_back', cjson.encode(before))
  end
end
return 1
