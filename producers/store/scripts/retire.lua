#!lua flags=allow-oom
-- RETIRE(about) | the pool's entry equals `about`: the entry is removed.
-- KEYS: pools   ARGV: queue, about
-- Answers: 1 | 0
if redis.call('HGET', KEYS[1], ARGV[1]) ~= ARGV[2] then
  return 0
end
return redis.call('HDEL', KEYS[1], ARGV[1])
