#!lua
-- PAIR(row) | a copy with a record that has no row yet: its comparison with its task is appended to the last rows of the
-- model; else nothing. The record says so, so that a second call, after a lost reply or a killed sweeper, appends none.
-- KEYS: the copy's record, rows   ARGV: row (JSON), rows kept, time to live of the rows (s)
-- Answers: 1 (it has its row) | 0 (no record)
if redis.call('EXISTS', KEYS[1]) == 0 then
  return 0
end
if redis.call('HSETNX', KEYS[1], 'paired', 1) == 1 then
  redis.call('XADD', KEYS[2], 'MAXLEN', '~', ARGV[2], '*', 'row', ARGV[1])
  redis.call('EXPIRE', KEYS[2], ARGV[3])
end
return 1
