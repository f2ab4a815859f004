#!lua flags=allow-oom
-- SETTLE(c) | final: settled, claim and owner cleared; the TTL of record and stream starts. Else nothing.
-- Called after Celery's tracer, by the winner of FINISH or a worker that CLAIM answered `settle`. A reason to keep the
-- message as a dead letter is noted in the record: CLAIM repeats it to whoever gets the message of a settled task.
-- KEYS: task, stream   ARGV: id, default TTL (seconds), reason (or empty)
-- Answers: 1 settled (also if done before) | 0 not final | -1 no record | -2 none: it was deleted
-- include: _final.lua
-- include: _settle.lua
local status = redis.call('HGET', KEYS[1], 'status')
if not status then
  return redis.call('EXISTS', 'penstock:erased:' .. ARGV[1]) == 1 and -2 or -1
end
if not FINAL[status] then
  return 0
end
if ARGV[3] ~= '' then
  redis.call('HSET', KEYS[1], 'letter', ARGV[3])
end
settle(KEYS[1], KEYS[2], ARGV[1], ARGV[2])
return 1
