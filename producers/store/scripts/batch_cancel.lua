#!lua flags=allow-oom
-- BATCH_CANCEL | not ended: `cancelling`; the sweeper cancels its lines, writes what there is, and ends it. Else
-- nothing.
-- KEYS: batch
-- Answers: {accepted 0|1 (1 also where it is `cancelling`), the status then | gone}
-- include: _batch.lua
local status = redis.call('HGET', KEYS[1], 'status')
if not status or ENDED[status] then
  return { 0, status or 'gone' }
end
if status ~= 'cancelling' then
  redis.call('HSET', KEYS[1], 'status', 'cancelling', 'cancelling_at', now_ms())
end
return { 1, 'cancelling' }
