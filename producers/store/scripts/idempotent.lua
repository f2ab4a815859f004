#!lua
-- IDEMPOTENT(digest, made) | an unknown key: it stands for this digest and this id, for `ttl` seconds; else nothing.
-- Called before something is made with the id that this answers. Whoever makes it sets the field `made` in the same
-- script (ADMIT), or calls MADE afterwards.
-- With a second key, its tenant's keys are counted there by the hour in which they began; those of the last 24 hours,
-- and of the hour before, may be `most`. Beyond, a new key stands for nothing.
-- A task in chunks whose submitter died before the last of them was not accepted (PARENT): its key stands for this id from
-- now on.
-- KEYS: entry, and counts of the tenant   ARGV: digest, id, ttl (seconds), most
-- Answers: {new | known | made, id, time of the first call (ms)} | {conflict} (the key stands for another digest)
--          | {full, keys of the tenant}
-- include: producers.connection/_now.lua
local entry = KEYS[1]
local known = redis.call('HMGET', entry, 'digest', 'id', 'at', 'made')
if known[1] then
  if known[1] ~= ARGV[1] then
    return { 'conflict' }
  end
  local task = known[4] and known[2] ~= ARGV[2] and redis.call('HMGET', 'penstock:task:' .. known[2], 'chunks', 'error')
  if not (task and task[1] and string.find(task[2] or '', '"code":"submit_failed"', 1, true)) then
    return { known[4] and 'made' or 'known', known[2], known[3] }
  end
  local now = now_ms()
  redis.call('HDEL', entry, 'made')
  redis.call('HSET', entry, 'id', ARGV[2], 'at', now)
  return { 'new', ARGV[2], tostring(now) }
end
local now = now_ms()
if KEYS[2] then
  local hour, kept = math.floor(now / 3600000), 0
  local counts = redis.call('HGETALL', KEYS[2])
  for i = 1, #counts, 2 do
    if tonumber(counts[i]) < hour - 24 then
      redis.call('HDEL', KEYS[2], counts[i])
    else
      kept = kept + counts[i + 1]
    end
  end
  if kept >= tonumber(ARGV[4]) then
    return { 'full', kept }
  end
  redis.call('HINCRBY', KEYS[2], hour, 1)
  redis.call('EXPIRE', KEYS[2], 25 * 3600)
end
redis.call('HSET', entry, 'digest', ARGV[1], 'id', ARGV[2], 'at', now)
redis.call('EXPIRE', entry, ARGV[3])
return { 'new', ARGV[2], tostring(now) }
