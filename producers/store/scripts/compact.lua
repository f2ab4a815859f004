#!lua flags=allow-oom
-- COMPACT(settled, n, blocks) | the record was settled at that time and the stream has n entries: the blocks replace the
-- stream and get its remaining TTL; else nothing. A settled stream never changes, and the time tells this task from an
-- earlier one of the same id, so the stream is still the one that was read.
-- The stream is removed first: a server at `maxmemory` lets a script write after it has freed memory.
-- KEYS: task, stream, result, settled   ARGV: id, settled (ms), n, block, ...
-- Answers: done (also if done before) | gone (no stream, no blocks) | unsettled | changed (read it again)
local stream, result = KEYS[2], KEYS[3]
local length = redis.call('XLEN', stream)
if length == 0 then
  redis.call('ZREM', KEYS[4], ARGV[1])
  return redis.call('EXISTS', result) == 1 and 'done' or 'gone'
end
local settled = redis.call('HGET', KEYS[1], 'settled')
if not settled then
  redis.call('ZREM', KEYS[4], ARGV[1])
  return 'unsettled'
end
if settled ~= ARGV[2] or length ~= tonumber(ARGV[3]) then
  return 'changed'
end
local left = redis.call('PTTL', stream)
redis.call('UNLINK', stream)
redis.call('ZREM', KEYS[4], ARGV[1])
for k = 4, #ARGV do
  redis.call('HSET', result, k - 4, ARGV[k])
end
if left > 0 then
  redis.call('PEXPIRE', result, left)
end
return 'done'
