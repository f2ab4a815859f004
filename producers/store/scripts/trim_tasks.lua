#!lua flags=allow-oom
-- TRIM_TASKS(cursor) | of the next entries of an index of tasks, as ZSCAN gives them, those without a record are
-- removed; of a tenant's index also those whose record is another tenant's by now. A tenant without an index
-- leaves the set.
-- KEYS: index   ARGV: cursor (0: from the beginning), about how many entries, its tenant ('': the index of all)
-- Answers: {next cursor (0: that was all), entries looked at, removed}
local found = redis.call('ZSCAN', KEYS[1], ARGV[1], 'COUNT', ARGV[2])
local removed = 0
for i = 1, #found[2], 2 do
  local r = redis.call('HMGET', 'penstock:task:' .. found[2][i], 'status', 'tenant')
  if not r[1] or ARGV[3] ~= '' and r[2] ~= ARGV[3] then
    removed = removed + redis.call('ZREM', KEYS[1], found[2][i])
  end
end
if ARGV[3] ~= '' and redis.call('EXISTS', 'penstock:tasks:' .. ARGV[3], 'penstock:requests:' .. ARGV[3]) == 0 then
  redis.call('SREM', 'penstock:tenants', ARGV[3])
end
return { found[1], #found[2] / 2, removed }
