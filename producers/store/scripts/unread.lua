#!lua flags=allow-oom
-- UNREAD(over) | the task's reader lease is the one that ended at `over`, which is past: the lease is removed and the
-- task CANCELled. Else nothing: a reader that renewed in time is alive.
-- KEYS: task, stream, readers   ARGV: id, over (ms, as LAPSED answered it)
-- Answers: {unread 0|1, accepted 0|1, status | gone}; {0} if nothing was done
-- include: _final.lua
-- include: _cancel.lua
local id, over = ARGV[1], tonumber(ARGV[2])
local ends = redis.call('ZSCORE', KEYS[3], id)
if not ends or tonumber(ends) ~= over or over > now_ms() then
  return { 0 }
end
redis.call('ZREM', KEYS[3], id)
local answer = cancel(KEYS[1], KEYS[2], id)
return { 1, answer[1], answer[2] }
