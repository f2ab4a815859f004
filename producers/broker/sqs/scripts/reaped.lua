#!lua flags=allow-oom
-- REAPED(inc, fields) | lease absent: remove these from those in flight, since SQS shows or has deleted their messages.
-- With the last of them the incarnation is forgotten.
-- KEYS: lease, in flight of inc, incarnations   ARGV: inc, field ...
-- Answers: remaining entries; -1 while the lease is valid
if redis.call('EXISTS', KEYS[1]) == 1 then
  return -1
end
for k = 2, #ARGV do
  redis.call('HDEL', KEYS[2], ARGV[k])
end
local left = redis.call('HLEN', KEYS[2])
if left == 0 then
  redis.call('HDEL', KEYS[3], ARGV[1])
end
return left
