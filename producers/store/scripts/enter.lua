#!lua flags=allow-oom
-- ENTER(pool) | the pool's entry is this one, and another entry goes, if it is there. A full store takes it, so that
-- workers that start there can go on with what waits.
-- KEYS: pools   ARGV: queue, about (JSON), queue of the entry that goes
-- Answers: 1
redis.call('HSET', KEYS[1], ARGV[1], ARGV[2])
redis.call('HDEL', KEYS[1], ARGV[3])
return 1
