#!lua flags=allow-oom
-- RESTORED | a plain Celery task of a restored backup that has not ended: `failed`. Its message was in the broker alone,
-- so nobody would ever go on with it. Else nothing.
-- KEYS: task, stream   ARGV: id
-- Answers: the status then | gone
-- include: _final.lua
local status, plain = unpack(redis.call('HMGET', KEYS[1], 'status', 'plain'))
if not status or FINAL[status] or not plain then
  return status or 'gone'
end
redis.call('HDEL', KEYS[1], 'claim', 'owner')
local err = '{"code":"restored","message":"The system was restored from a backup, which has no messages of Celery. '
  .. 'Send the task again."}'
finalise(KEYS[1], KEYS[2], ARGV[1], 'failed', '[]', err, prompt_used(KEYS[1]), 0)
return 'failed'
