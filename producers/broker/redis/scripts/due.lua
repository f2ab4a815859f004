#!lua flags=allow-oom
-- DUE | moves the delayed messages of a queue without workers to the fronts of their lists, the soonest due to the very
-- front.
-- KEYS: delayed
-- Answers: the number of moved messages
local held = redis.call('ZRANGE', KEYS[1], 0, 999)
for i = #held, 1, -1 do
  local e = cmsgpack.unpack(held[i])
  redis.call('RPUSH', e[1], e[2])
  redis.call('ZREM', KEYS[1], held[i])
end
return #held
