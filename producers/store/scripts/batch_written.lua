#!lua flags=allow-oom
-- BATCH_WRITTEN(from) | not ended, and the results of all lines before `from` are written: the parts that hold those of
-- the next lines become part of the batch's files, and these lines' records, streams and errors are removed. One call,
-- so each line is in one part. Else nothing.
-- KEYS: batch, parts, refused lines
-- ARGV: batch's id, from (line), lines, offset behind them in the input (bytes), lines in the output, lines in the
--       errors, of these expired, number of parts; then each part (JSON: kind, name, bytes), then the lines' tasks' ids
-- Answers: 1 | 0 (nothing was done)
-- include: _batch.lua
local batch, from, lines = KEYS[1], tonumber(ARGV[2]), tonumber(ARGV[3])
local r = redis.call('HMGET', batch, 'status', 'written')
if not r[1] or ENDED[r[1]] or r[1] == 'validating' or tonumber(r[2]) ~= from then
  return 0
end
redis.call('HSET', batch, 'written', from + lines, 'written_offset', ARGV[4])
redis.call('HINCRBY', batch, 'outputs', ARGV[5])
redis.call('HINCRBY', batch, 'errors', ARGV[6])
redis.call('HINCRBY', batch, 'lapsed', ARGV[7])
local parts = tonumber(ARGV[8])
if parts > 0 then
  redis.call('HSET', KEYS[2], from, '[' .. table.concat(ARGV, ',', 9, 8 + parts) .. ']')
end
local results = 0
for k = 1, lines do
  results = results + (tonumber(redis.call('HGET', 'penstock:task:' .. ARGV[8 + parts + k], 'result_bytes') or nil) or 0)
  drop(ARGV[1], ARGV[8 + parts + k])
  redis.call('HDEL', KEYS[3], from + k - 1)
end
-- Where none is left, what records that were lost had counted goes, too.
if redis.call('HGET', batch, 'line') == tostring(from + lines) then
  redis.call('HDEL', batch, 'result_bytes')
elseif results > 0 then
  redis.call('HINCRBY', batch, 'result_bytes', -results)
end
return 1
