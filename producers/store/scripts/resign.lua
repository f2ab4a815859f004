#!lua flags=allow-oom
-- RESIGN(me) | `me` leads: the leader's lease is removed; else nothing.
-- KEYS: lease   ARGV: me
-- Answers: 1 | 0
if redis.call('GET', KEYS[1]) == ARGV[1] then
  return redis.call('DEL', KEYS[1])
end
return 0
