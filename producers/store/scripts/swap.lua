#!lua flags=allow-oom
-- SWAP(old -> new) | the field has the value `old`: it has `new`; else nothing. A new field where there are `most`: it
-- takes the place of `dropped`, if that field is there, else nothing. Nor where `most_alike` values contain `alike`.
-- What it changes is also appended to the audit log, where ARGV says what to append
-- (`producers/store/access/audit.py`).
-- KEYS: hash   ARGV: field, old ('': there is no field), new ('': none from now on), most fields (0: any number),
--       entry of the audit log ('': none), entries kept, dropped ('': none), its entry of the audit log,
--       alike ('': none), most alike
-- Answers: 1 done (also if done before) | 0 it has another value | -1 there are `most` | -2 there are `most_alike`
local now = redis.call('HGET', KEYS[1], ARGV[1]) or ''
if now == ARGV[3] then
  return 1
end
if now ~= ARGV[2] then
  return 0
end
local most, alike, kept = tonumber(ARGV[4]), ARGV[9], 0
for _, value in ipairs(now == '' and alike ~= '' and redis.call('HVALS', KEYS[1]) or {}) do
  kept = kept + (string.find(value, alike, 1, true) and 1 or 0)
end
if alike ~= '' and kept >= tonumber(ARGV[10]) then
  return -2
end
if now == '' and most > 0 and redis.call('HLEN', KEYS[1]) >= most then
  if ARGV[7] == '' or redis.call('HDEL', KEYS[1], ARGV[7]) == 0 then
    return -1
  end
  redis.call('XADD', 'penstock:audit', 'MAXLEN', '~', ARGV[6], '*', 'e', ARGV[8])
end
if ARGV[3] == '' then
  redis.call('HDEL', KEYS[1], ARGV[1])
else
  redis.call('HSET', KEYS[1], ARGV[1], ARGV[3])
end
if ARGV[5] ~= '' then
  redis.call('XADD', 'penstock:audit', 'MAXLEN', '~', ARGV[6], '*', 'e', ARGV[5])
end
return 1
