#!lua flags=allow-oom
-- GONE | removes messages that nobody needs from a list's index, and the list itself once none of its messages waits.
-- KEYS: unserved   ARGV: list, member ...
-- Answers: how many were removed
-- include: _index.lua
local list, left = ARGV[1], 0
for k = 2, #ARGV do
  if leave(list, ARGV[k]) then
    left = left + 1
  end
end
if redis.call('EXISTS', 'penstock:sqs:waiting:' .. list) == 0 then
  redis.call('SREM', 'penstock:sqs:lists', list)
  redis.call('HDEL', KEYS[1], list)
end
return left
