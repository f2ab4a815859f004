#!lua flags=allow-oom
-- COUNTED(c, n) | Other claim, final, or known already: nothing. Else the record says how many tokens its prompt has,
-- which came as text: whatever ends the task without its worker tells what was used.
-- KEYS: task   ARGV: claim, n
-- Answers: 1 | 0
local r = redis.call('HMGET', KEYS[1], 'claim', 'end')
if not r[1] or r[1] ~= ARGV[1] or r[2] then
  return 0
end
return redis.call('HSETNX', KEYS[1], 'prompt_tokens', ARGV[2])
