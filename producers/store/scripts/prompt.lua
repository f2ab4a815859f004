#!lua
-- PROMPT(c, entries) | Other claim or final: `other`. Cancel: `cancel`. In the stream already: `ok`, not published again.
-- Else append + publish, and the record says how many entries they are: `ok`. They count no token; whoever makes them
-- says so in every APPEND and FINISH, which take nothing where they are not there: so they stand before token 0.
-- KEYS: task, stream
-- ARGV: id, claim, entry, ... (JSON objects, as they go into the stream)
-- Answers: ok | other | cancel
local task, stream, id = KEYS[1], KEYS[2], ARGV[1]
local r = redis.call('HMGET', task, 'claim', 'end', 'cancel', 'prompt')
if r[1] ~= ARGV[2] or r[2] then
  return 'other'
end
if r[3] then
  return 'cancel'
end
if r[4] then
  return 'ok'
end
local at = redis.call('XLEN', stream)
for k = 3, #ARGV do
  redis.call('XADD', stream, (at + k - 2) .. '-0', 'e', ARGV[k])
  redis.call('PUBLISH', 'penstock:tokens:' .. id, '[' .. (at + k - 3) .. ',' .. ARGV[k] .. ']')
end
redis.call('HSET', task, 'prompt', #ARGV - 2)
return 'ok'
