#!lua flags=allow-oom
-- PROBE | runs the kinds of commands that the other scripts run, to check the user's permissions. It leaves nothing.
-- KEYS: a task id that is never used   ARGV: its channel, then commands, of which none is run
-- Answers: those of the commands that the user may not call
redis.call('HSET', KEYS[1], 'v', 1)
redis.call('XADD', KEYS[1] .. ':stream', '1-0', 'e', '')
redis.call('DEL', KEYS[1], KEYS[1] .. ':stream')
redis.call('PUBLISH', ARGV[1], '')
local denied = {}
for k = 2, #ARGV do
  local words = {}
  for word in string.gmatch(ARGV[k], '%S+') do
    words[#words + 1] = word
  end
  if not redis.acl_check_cmd(unpack(words)) then
    denied[#denied + 1] = ARGV[k]
  end
end
return denied
