#!lua flags=allow-oom
-- RECALL | no incarnation that takes from these lists has its lease: as UNSORT; else nothing. Turns of tenants are those of
-- who serves them, and a worker that has just begun goes on with them.
-- KEYS: incarnations, list ...   ARGV: how many, at most; the queues of the pools whose workers take from these lists ...
-- Answers: how many went back, fewer than asked for: all; -1 where one lives
-- include: _unsort.lua
local takers, lists = {}, {}
for k = 2, #ARGV do
  takers[ARGV[k]] = true
end
local listed = redis.call('HGETALL', KEYS[1])
for k = 1, #listed, 2 do
  if takers[listed[k + 1]] and redis.call('EXISTS', 'penstock:lease:' .. listed[k]) == 1 then
    return -1
  end
end
for k = 2, #KEYS do
  lists[#lists + 1] = KEYS[k]
end
return unsort_all(lists, tonumber(ARGV[1]))
