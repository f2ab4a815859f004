#!lua flags=allow-oom
-- LEASE(inc) | `take`: it is entered; else renewed where it is there. A script, because a plain SET is refused when memory
-- is full: then all workers would be taken for dead, who are to make room. The broker has one of its own.
-- KEYS: lease   ARGV: what the worker says of itself (JSON), ttl (ms), take 0|1
-- Answers: 1 | 0 gone
if ARGV[3] == '0' and redis.call('EXISTS', KEYS[1]) == 0 then
  return 0
end
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
return 1
