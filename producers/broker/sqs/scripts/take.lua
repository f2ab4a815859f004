#!lua
-- TAKE(inc, messages) | lease present: make each message of the worker's buffer a delivery under its UUID, counted
-- once; its list is served now. Without messages it only reads.
-- KEYS: lease, in flight of inc, unserved, index ... of the lists
-- ARGV: number of lists, list ..., then for each message its field in the buffer, UUID, entry (JSON), tokens, list
-- Answers: {-1} without a lease; else for each list: messages to receive now, since when it is unserved (ms, or 0)
-- include: _index.lua
if redis.call('EXISTS', KEYS[1]) == 0 then
  return { -1 }
end
local now, nlists, taken, tokens = now_ms(), tonumber(ARGV[1]), 0, 0
for k = nlists + 2, #ARGV, 5 do
  if redis.call('HDEL', KEYS[2], ARGV[k]) == 1 then
    taken, tokens = taken + 1, tokens + tonumber(ARGV[k + 3])
    redis.call('HSET', KEYS[3], ARGV[k + 4], now)
  end
  redis.call('HSET', KEYS[2], ARGV[k + 1], ARGV[k + 2])
end
if taken > 0 then
  redis.call('INCRBY', 'penstock:deliveries', taken)
end
if tokens > 0 then
  redis.call('INCRBY', 'penstock:deliveries:tokens', tokens)
end
local out = {}
for k = 1, nlists do
  local count, name = redis.call('ZCOUNT', KEYS[3 + k], '-inf', now), ARGV[1 + k]
  local since = tonumber(redis.call('HGET', KEYS[3], name) or 'inf')
  if count == 0 then
    since = 0
    redis.call('HDEL', KEYS[3], name)
  elseif since > now then -- the list was empty before; or the clock was set back
    since = now
    redis.call('HSET', KEYS[3], name, now)
  end
  out[#out + 1], out[#out + 2] = count, since
end
return out
