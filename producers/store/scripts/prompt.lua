#!lua flags=allow-oom
-- PROMPT(c, entries) | No record: `gone`. Other claim or final: `other`. Cancel: `cancel`. In the stream already: `ok`,
-- not published again. The server is too full for its tier (_memory.lua): `full`. Else append + publish, and store the number of entries in the record: `ok`. The entries count as
-- no tokens. Their worker says `scored` in every APPEND and FINISH, which do nothing while they are missing: so they
-- precede token 0.
-- KEYS: task, stream
-- ARGV: id, claim, entry, ... (stream entries, JSON objects)
-- Answers: ok | gone | other | cancel | full
-- include: producers.connection/_now.lua
-- include: _memory.lua
-- include: _followers.lua
local task, stream, id = KEYS[1], KEYS[2], ARGV[1]
local r = redis.call('HMGET', task, 'claim', 'end', 'cancel', 'prompt')
if r[1] ~= ARGV[2] or r[2] then
  return redis.call('EXISTS', task) == 1 and 'other' or 'gone'
end
if r[3] then
  return 'cancel'
end
if r[4] then
  return 'ok'
end
if not may_write(task, now_ms()) then
  return 'full'
end
local at = redis.call('XLEN', stream)
for k = 3, #ARGV do
  redis.call('XADD', stream, (at + k - 2) .. '-0', 'e', ARGV[k])
  tell(task, id, '[' .. (at + k - 3) .. ',' .. ARGV[k] .. ']')
end
redis.call('HSET', task, 'prompt', #ARGV - 2)
return 'ok'
