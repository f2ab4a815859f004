#!lua flags=allow-oom
-- DUE | for a queue that no worker takes from: what was held back for later goes to the fronts of its lists, what was
-- due first to the very front.
-- KEYS: delayed
-- Answers: how many messages were moved
local held = redis.call('ZRANGE', KEYS[1], 0, 999)
for i = #held, 1, -1 do
  local e = cmsgpack.unpack(held[i])
  redis.call('RPUSH', e[1], e[2])
  redis.call('ZREM', KEYS[1], held[i])
end
return #held
