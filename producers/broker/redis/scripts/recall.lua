#!lua flags=allow-oom
-- RECALL | no incarnation that takes from these lists has its lease: what was sorted by tenant goes back to their fronts,
-- in the order of its arrival, so that a list's length says again how much waits; else nothing. Turns of tenants are those
-- of who serves them, and a worker that has just begun goes on with them.
-- KEYS: incarnations, list ...   ARGV: how many, at most; the queues of the pools whose workers take from these lists ...
-- Answers: how many went back, fewer than asked for: all; -1 where one lives
-- include: _unsort.lua
local takers = {}
for k = 2, #ARGV do
  takers[ARGV[k]] = true
end
local listed = redis.call('HGETALL', KEYS[1])
for k = 1, #listed, 2 do
  if takers[listed[k + 1]] and redis.call('EXISTS', 'penstock:lease:' .. listed[k]) == 1 then
    return -1
  end
end
local moved, count = 0, tonumber(ARGV[1])
for k = 2, #KEYS do
  moved = moved + (moved < count and unsort(KEYS[k], count - moved) or 0)
end
return moved
