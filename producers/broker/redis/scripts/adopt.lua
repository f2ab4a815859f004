#!lua flags=allow-oom
-- ADOPT | no live incarnation of the pool may take them: the waiting messages of its own queue, or of one beside that,
-- move to the front of its version's lists, in their order, and its delayed messages to that queue's; else nothing.
-- KEYS: incarnations, delayed of the source, delayed of the target, then source list, target list, ...
-- ARGV: the pool's queue; the level that tasks of the source need
-- Answers: the number of moved messages; -1 if a worker lives
-- include: _takers.lua
-- include: _unsort.lua
if one_lives(KEYS[1], { [ARGV[1]] = true }, tonumber(ARGV[2])) then
  return -1
end
local moved, lists = 0, {}
for k = 4, #KEYS, 2 do
  lists[KEYS[k]] = KEYS[k + 1]
  repeat until unsort(KEYS[k], 1000) == 0
  while redis.call('LMOVE', KEYS[k], KEYS[k + 1], 'LEFT', 'RIGHT') do
    moved = moved + 1
  end
end
for _, packed in ipairs(redis.call('ZRANGE', KEYS[2], 0, -1)) do
  local e = cmsgpack.unpack(packed)
  e[1] = lists[e[1]] or e[1]
  redis.call('ZADD', KEYS[3], redis.call('ZSCORE', KEYS[2], packed), cmsgpack.pack(e))
  moved = moved + 1
end
redis.call('DEL', KEYS[2])
return moved
