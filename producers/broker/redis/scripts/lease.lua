#!lua flags=allow-oom
-- LEASE(inc) | `take`: it is entered, and listed with its queue; else renewed where it is there. A script, because a plain
-- SET is refused when memory is full: then all workers would be taken for dead, who are to make room.
-- KEYS: lease, incarnations   ARGV: inc, what it says of itself (JSON), ttl (ms), take 0|1, queue
-- Answers: 1 | 0 gone
if ARGV[4] == '0' and redis.call('EXISTS', KEYS[1]) == 0 then
  return 0
end
redis.call('SET', KEYS[1], ARGV[2], 'PX', ARGV[3])
if ARGV[4] == '1' then
  redis.call('HSET', KEYS[2], ARGV[1], ARGV[5])
end
return 1
