#!lua flags=allow-oom
-- TRIM_TASKS(cursor) | of the next entries of the index of tasks, as ZSCAN gives them, those without a record are removed.
-- KEYS: tasks   ARGV: cursor (0: from the beginning), about how many entries
-- Answers: {next cursor (0: that was all), entries looked at, removed}
local found = redis.call('ZSCAN', KEYS[1], ARGV[1], 'COUNT', ARGV[2])
local removed = 0
for i = 1, #found[2], 2 do
  if redis.call('EXISTS', 'penstock:task:' .. found[2][i]) == 0 then
    removed = removed + redis.call('ZREM', KEYS[1], found[2][i])
  end
end
return { found[1], #found[2] / 2, removed }
