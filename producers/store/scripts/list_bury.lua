#!lua flags=allow-oom
-- LIST_BURY | a message that is taken: it is a dead letter; one that is gone: nothing.
-- KEYS: taken (hash), hidden (zset), dead letters (list)   ARGV: id, letter
-- Answers: 1 | 0
if redis.call('HDEL', KEYS[1], ARGV[1]) == 0 then
  return 0
end
redis.call('ZREM', KEYS[2], ARGV[1])
redis.call('RPUSH', KEYS[3], ARGV[2])
return 1
