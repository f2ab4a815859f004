#!lua flags=allow-oom
-- RETRY(delay) | the row is due and held by `holder`: it is due in `delay` ms, held by nobody; else nothing. Without
-- attempts (a process that stops gives back what it has not tried) no try is counted.
-- KEYS: row, due   ARGV: name, holder, delay (ms), attempts (JSON array) or nothing
-- Answers: 1 done | 0 another holder has it, it was done before, or the row is gone
-- include: producers.connection/_now.lua
local r = redis.call('HMGET', KEYS[1], 'state', 'holder')
if r[1] ~= 'due' or r[2] ~= ARGV[2] then
  return 0
end
redis.call('HDEL', KEYS[1], 'holder')
if ARGV[4] ~= '' then
  redis.call('HSET', KEYS[1], 'attempts', ARGV[4])
  redis.call('HINCRBY', KEYS[1], 'tries', 1)
end
redis.call('ZADD', KEYS[2], now_ms() + ARGV[3], ARGV[1])
if tonumber(ARGV[3]) == 0 then
  redis.pcall('PUBLISH', 'penstock:webhooks:wake', redis.call('HGET', KEYS[1], 'source') or '')
end
return 1
