#!lua flags=allow-oom
-- RETIRE(about) | the pool's entry equals `about`, and no model's tasks are sent to its queue: the entry is removed.
-- KEYS: pools, routes   ARGV: queue, about
-- Answers: 1 | 0
for _, queue in ipairs(redis.call('HVALS', KEYS[2])) do
  if queue == ARGV[1] then
    return 0
  end
end
if redis.call('HGET', KEYS[1], ARGV[1]) ~= ARGV[2] then
  return 0
end
return redis.call('HDEL', KEYS[1], ARGV[1])
