-- SCALE(me, pool) | `me` leads the autoscalers: the pool's state is `state`, or is removed if that is ''; with
-- `entry`, the decision is kept, too.
-- KEYS: leader's lease, hash of pools, stream of decisions   ARGV: me, pool, state (JSON or ''), entry (JSON or ''), most
-- Answers: 1 | 0 (another leads, or nobody: nothing is written)
if redis.call('GET', KEYS[1]) ~= ARGV[1] then
  return 0
end
if ARGV[3] == '' then
  redis.call('HDEL', KEYS[2], ARGV[2])
else
  redis.call('HSET', KEYS[2], ARGV[2], ARGV[3])
end
if ARGV[4] ~= '' then
  redis.call('XADD', KEYS[3], 'MAXLEN', '~', ARGV[5], '*', 'pool', ARGV[2], 'decision', ARGV[4])
end
return 1
