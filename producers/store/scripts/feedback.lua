#!lua flags=allow-oom
-- FEEDBACK(none -> score) | the task is final and has no feedback: its record has the score, and a row of it is appended
-- to the feedback; else nothing.
-- KEYS: task, feedback   ARGV: score, rows kept
-- Answers: 1 done (also if it had this score before) | 0 there is no such task | -1 it has another score | -2 it is not
-- final
local r = redis.call('HMGET', KEYS[1], 'status', 'finished', 'feedback', 'model', 'version', 'alias', 'tier', 'created',
  'drawn', 'tenant')
if not r[1] then
  return 0
end
if not r[2] then
  return -2
end
if r[3] then
  return r[3] == ARGV[1] and 1 or -1
end
redis.call('HSET', KEYS[1], 'feedback', ARGV[1])
redis.call('XADD', KEYS[2], 'MAXLEN', '~', ARGV[2], '*', 'model', r[4] or '', 'version', r[5] or '', 'alias', r[6] or '',
  'tier', r[7] or 'default', 'created', r[8] or '', 'drawn', r[9] or '', 'tenant', r[10] or '', 'score', ARGV[1])
return 1
