#!lua flags=allow-oom
-- RECALL | no incarnation that serves these lists has its lease: messages that were sorted by tenant return to the
-- lists' fronts, in order of arrival, so that a list's length again counts all that wait; else nothing. A live worker
-- goes on with the sorted messages and the tenants' turns.
-- KEYS: incarnations, list ...
-- ARGV: messages to return at most; the level that the tasks need; queues of the pools that serve these lists ...
-- Answers: the number of returned messages (fewer than requested: all are done); -1 if a worker lives
-- include: _takers.lua
-- include: _unsort.lua
local takers = {}
for k = 3, #ARGV do
  takers[ARGV[k]] = true
end
if one_lives(KEYS[1], takers, tonumber(ARGV[2])) then
  return -1
end
local moved, count = 0, tonumber(ARGV[1])
for k = 2, #KEYS do
  moved = moved + (moved < count and unsort(KEYS[k], count - moved) or 0)
end
return moved
