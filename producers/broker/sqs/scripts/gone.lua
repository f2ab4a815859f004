#!lua flags=allow-oom
-- GONE | nobody needs these messages of a list: they leave its index; so does the list, once nothing of it waits.
-- KEYS: unserved   ARGV: list, member ...
-- Answers: how many left
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
