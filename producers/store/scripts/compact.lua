#!lua flags=allow-oom
-- COMPACT(settled, n, blocks) | the record was settled at that time and the stream has n entries: the blocks replace
-- the stream and get its remaining TTL; else nothing. A settled stream never changes, and the time tells this task from
-- an earlier one of the same id, so the stream is still the one that was read.
-- The blocks may be in a blob, which is noted as about to be written: then the reference replaces the stream, and the
-- note says from when on the blob may go, a minute after the reference.
-- The stream is removed first: a server at `maxmemory` lets a script write after it has freed memory.
-- KEYS: task, stream, result, settled, notes
-- ARGV: id, settled (ms), n, reference (JSON, or empty), the blob's name, age (s) at which notes are due; block, ...
-- Answers: done (also if done before, by this reference) | gone (no stream, no blocks) | other (compacted by another)
--          unsettled | changed (read it again) | late (the blob is not noted, or is to be deleted)
local stream, result, reference = KEYS[2], KEYS[3], ARGV[4]
local length = redis.call('XLEN', stream)
if length == 0 then
  redis.call('ZREM', KEYS[4], ARGV[1])
  if redis.call('EXISTS', result) == 0 then
    return 'gone'
  end
  return (redis.call('HGET', result, 'blob') or '') == reference and 'done' or 'other'
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
if reference ~= '' and (left <= 0 or (tonumber(redis.call('ZSCORE', KEYS[5], ARGV[5])) or 0) == 0) then
  return 'late'
end
redis.call('UNLINK', stream)
redis.call('ZREM', KEYS[4], ARGV[1])
if reference ~= '' then
  local due = redis.call('TIME')[1] + math.ceil(left / 1000) + 60
  redis.call('HSET', result, 'blob', reference)
  redis.call('ZADD', KEYS[5], due - ARGV[6], ARGV[5])
end
for k = 7, #ARGV do
  redis.call('HSET', result, k - 7, ARGV[k])
end
if left > 0 then
  redis.call('PEXPIRE', result, left)
end
return 'done'
