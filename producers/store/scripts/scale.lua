-- SCALE(me, pool) | `me` leads the autoscalers: the pool's state is `state`; with `entry`, the decision is kept, too.
-- Without `state` all that there is of the pool is removed, but for its decisions.
-- KEYS: leader's lease, hash of pools, stream of decisions, hash of retries
-- ARGV: me, pool, state (JSON or ''), entry (JSON or ''), most
-- Answers: 1 | 0 (another leads, or nobody: nothing is written)
if redis.call('GET', KEYS[1]) ~= ARGV[1] then
  return 0
end
if ARGV[3] == '' then
  redis.call('HDEL', KEYS[2], ARGV[2])
  redis.call('HDEL', KEYS[4], ARGV[2])
else
  redis.call('HSET', KEYS[2], ARGV[2], ARGV[3])
end
if ARGV[4] ~= '' then
  redis.call('XADD', KEYS[3], 'MAXLEN', '~', ARGV[5], '*', 'pool', ARGV[2], 'decision', ARGV[4])
end
return 1
