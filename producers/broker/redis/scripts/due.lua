#!lua flags=allow-oom
-- DUE | moves those delayed messages of a queue without workers that are due to the fronts of their lists, the soonest
-- due to the very front.
-- KEYS: delayed
-- Answers: the number of moved messages
-- include: producers.connection/_now.lua
local now = now_ms()
local held = redis.call('ZRANGEBYSCORE', KEYS[1], '-inf', now, 'LIMIT', 0, 1000)
for i = #held, 1, -1 do
  local e = cmsgpack.unpack(held[i])
  redis.call('RPUSH', e[1], e[2])
  redis.call('ZREM', KEYS[1], held[i])
end
return #held
