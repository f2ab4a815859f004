#!lua flags=allow-oom
-- BATCH_FAIL | not ended: `failed` as a whole, for these reasons, and the event is written. Else nothing.
-- KEYS: batch   ARGV: batch's id, reasons (JSON: [{code, line, message, param}])
-- Answers: the status then | gone
-- include: _batch.lua
local status = redis.call('HGET', KEYS[1], 'status')
if not status or ENDED[status] then
  return status or 'gone'
end
redis.call('HSET', KEYS[1], 'status', 'failed', 'failed_at', now_ms(), 'reasons', ARGV[2])
tell(KEYS[1], ARGV[1], 'failed')
return 'failed'
