#!lua flags=allow-oom
-- MOVE(message) | it waits in the list: it goes to the front of another; else nothing.
-- KEYS: list, the other   ARGV: message
-- Answers: 1 moved | 0
if redis.call('LREM', KEYS[1], 1, ARGV[1]) == 0 then
  return 0
end
redis.call('RPUSH', KEYS[2], ARGV[1])
return 1
