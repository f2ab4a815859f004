#!lua flags=allow-oom
-- PROBE | runs the kinds of commands that the other scripts run, to check the user's permissions. It leaves nothing.
-- KEYS: a task id that is never used   ARGV: its channel
redis.call('HSET', KEYS[1], 'v', 1)
redis.call('XADD', KEYS[1] .. ':stream', '1-0', 'e', '')
redis.call('DEL', KEYS[1], KEYS[1] .. ':stream')
redis.call('PUBLISH', ARGV[1], '')
return 1
