#!lua flags=allow-oom
-- BATCH_END | all lines are written and it is `finalizing` or `cancelling`, or it was cancelled before it began: it
-- ends `cancelled`, else `expired` if a line is, else `completed`, with the ids of its files, and the event is written
-- into the outbox. Else nothing.
-- KEYS: batch   ARGV: batch's id, output file's id or empty, error file's id or empty
-- Answers: the status then | gone
-- include: _batch.lua
local batch = KEYS[1]
local r = redis.call('HMGET', batch, 'status', 'total', 'written', 'outputs', 'errors', 'lapsed')
local status = r[1]
if status ~= 'finalizing' and status ~= 'cancelling' or r[2] and tonumber(r[3]) < tonumber(r[2]) then
  return status or 'gone'
end
status = status == 'cancelling' and 'cancelled' or tonumber(r[6]) > 0 and 'expired' or 'completed'
redis.call('HSET', batch, 'status', status, status .. '_at', now_ms(), 'completed', r[4], 'failed', r[5])
if ARGV[2] ~= '' then
  redis.call('HSET', batch, 'output_file', ARGV[2])
end
if ARGV[3] ~= '' then
  redis.call('HSET', batch, 'error_file', ARGV[3])
end
tell(batch, ARGV[1], status)
return status
