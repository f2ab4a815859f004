#!lua flags=allow-oom
-- ADOPT | moves the waiting messages of a pool without workers to the front of another pool's lists, in their order, and
-- its delayed messages to that pool's.
-- KEYS: delayed of the source, delayed of the target, then source list, target list, ...
-- Answers: the number of moved messages
-- include: _unsort.lua
local moved = 0
for k = 3, #KEYS, 2 do
  repeat until unsort(KEYS[k], 1000) == 0
  while redis.call('LMOVE', KEYS[k], KEYS[k + 1], 'LEFT', 'RIGHT') do
    moved = moved + 1
  end
end
for _, packed in ipairs(redis.call('ZRANGE', KEYS[1], 0, -1)) do
  redis.call('ZADD', KEYS[2], redis.call('ZSCORE', KEYS[1], packed), packed)
  moved = moved + 1
end
redis.call('DEL', KEYS[1])
return moved
