#!lua flags=allow-oom
-- PROBE | whether this user may do in a script what the others do. Nothing is left, and nobody listens.
-- KEYS: a task that never is   ARGV: its channel
redis.call('HSET', KEYS[1], 'v', 1)
redis.call('XADD', KEYS[1] .. ':stream', '1-0', 'e', '')
redis.call('DEL', KEYS[1], KEYS[1] .. ':stream')
redis.call('PUBLISH', ARGV[1], '')
return 1
