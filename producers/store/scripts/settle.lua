#!lua flags=allow-oom
-- SETTLE(c) | after the tracer: settled, clears claim and owner; record and stream TTL start here.
-- Only the winner of FINISH, or whom CLAIM told to settle, calls it; a record that is not final is left alone.
-- KEYS: task, stream   ARGV: id, default TTL (seconds)
-- Answers: 1 settled (also before) | 0
-- include: _final.lua
-- include: _settle.lua
local status = redis.call('HGET', KEYS[1], 'status')
if not status or not FINAL[status] then
  return 0
end
settle(KEYS[1], KEYS[2], ARGV[1], ARGV[2])
return 1
