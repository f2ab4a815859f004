#!lua flags=allow-oom
-- BATCH_PART | the batch has not ended: the names of blobs that are about to be written are noted, to be removed at its
-- end, whoever writes them.
-- KEYS: batch, begun parts   ARGV: name, ...
-- Answers: 1 | 0 (it has ended)
-- include: _batch.lua
local status = redis.call('HGET', KEYS[1], 'status')
if not status or ENDED[status] then
  return 0
end
redis.call('SADD', KEYS[2], unpack(ARGV))
return 1
