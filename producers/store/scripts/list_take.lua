#!lua flags=allow-oom
-- LIST_TAKE(n, hidden) | the next messages of a list: those whose time hidden is over, then from the list's head. Each
-- is hidden from others for `hidden` ms; one from the list gets an id of its own.
-- KEYS: list, taken (hash), hidden (zset)   ARGV: hidden (ms), a fresh id for each message that may be taken
-- Answers: {id, body, ...}
-- include: producers.connection/_now.lua
local now = now_ms()
local out = {}
for _, id in ipairs(redis.call('ZRANGEBYSCORE', KEYS[3], '-inf', now, 'LIMIT', 0, #ARGV - 1)) do
  local body = redis.call('HGET', KEYS[2], id)
  if body then
    redis.call('ZADD', KEYS[3], now + ARGV[1], id)
    out[#out + 1] = id
    out[#out + 1] = body
  else
    redis.call('ZREM', KEYS[3], id)
  end
end
for i = 2 + #out / 2, #ARGV do
  local body = redis.call('LPOP', KEYS[1])
  if not body then
    break
  end
  redis.call('HSET', KEYS[2], ARGV[i], body)
  redis.call('ZADD', KEYS[3], now + ARGV[1], ARGV[i])
  out[#out + 1] = ARGV[i]
  out[#out + 1] = body
end
return out
