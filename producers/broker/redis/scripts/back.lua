#!lua flags=allow-oom
-- BACK(uuid) | the entry exists: return it to the front of its list (after the delay), or of its tier's list in another
-- queue, to be sorted to its former place among its tenant's messages; the tenant's charge is refunded. Else nothing.
-- KEYS: in flight of inc, delayed, returned   ARGV: uuid, delay (ms); for another queue its lists of the tiers 0 to 3
-- Answers: 1 returned | 0
-- include: producers.connection/_now.lua
-- include: _fair.lua
local packed = redis.call('HGET', KEYS[1], ARGV[1])
if not packed then
  return 0
end
local e = cmsgpack.unpack(packed)
redis.call('HDEL', KEYS[1], ARGV[1])
local delay = tonumber(ARGV[2])
if delay > 0 then
  redis.call('ZADD', KEYS[2], now_ms() + delay, cmsgpack.pack({ e[2], e[4], ARGV[1] }))
else
  redis.call('RPUSH', ARGV[3 + e[5]] or e[2], e[4])
end
if e[8] then
  redis.call('HSET', KEYS[3], e[3], e[8])
end
correct(e, 0)
return 1
