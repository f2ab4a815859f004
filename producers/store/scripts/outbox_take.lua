#!lua flags=allow-oom
-- TAKE(holder, ms, n) | the n oldest rows that are due: leased to `holder` for `ms`. A row whose lease is over is due
-- again.
-- KEYS: due   ARGV: holder (a fresh id for each call), lease (ms), n
-- Answers: {ms until the next row is due (-1: there is none), row's name, {field, value, ...}, ...}; oldest first
-- include: producers.connection/_now.lua
local now = now_ms()
local out = { -1 }
for _, name in ipairs(redis.call('ZRANGEBYSCORE', KEYS[1], '-inf', now, 'LIMIT', 0, ARGV[3])) do
  local row = 'penstock:webhooks:row:' .. name
  if redis.call('EXISTS', row) == 1 then
    redis.call('HSET', row, 'holder', ARGV[1])
    redis.call('ZADD', KEYS[1], now + ARGV[2], name)
    out[#out + 1] = name
    out[#out + 1] = redis.call('HGETALL', row)
  else
    redis.call('ZREM', KEYS[1], name)
  end
end
local next = redis.call('ZRANGE', KEYS[1], 0, 0, 'WITHSCORES')[2]
if next then
  out[1] = math.max(0, next - now)
end
return out
