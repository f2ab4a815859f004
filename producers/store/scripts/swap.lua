#!lua flags=allow-oom
-- SWAP(old -> new) | the field has the value `old`: it has `new`; else nothing. A new field where there are `most`: nothing.
-- What it changes is also appended to the audit log, where ARGV says what to append (`producers/store/access/audit.py`).
-- KEYS: hash   ARGV: field, old ('': there is no field), new ('': none from now on), most fields (0: any number),
--       entry of the audit log ('': none), entries kept
-- Answers: 1 done (also if done before) | 0 it has another value | -1 there are `most`
local now = redis.call('HGET', KEYS[1], ARGV[1]) or ''
if now == ARGV[3] then
  return 1
end
if now ~= ARGV[2] then
  return 0
end
local most = tonumber(ARGV[4])
if now == '' and most > 0 and redis.call('HLEN', KEYS[1]) >= most then
  return -1
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
