#!lua flags=allow-oom
-- SWAP(old -> new) | the field has the value `old`: it has `new`; else nothing. A new field where there are `most`: it
-- takes the place of `dropped`, if that field is there, else nothing.
-- Of webhook endpoints, the ids of the field's tenant are a second key: a new one enters them, unless there are
-- `most_own`, and one that is removed leaves them (_endpoints.lua).
-- What it changes is also appended to an audit log, where ARGV says what to append
-- (`producers/store/access/audit.py`).
-- KEYS: hash, and for endpoints ids of the tenant's
-- ARGV: field, old ('': there is no field), new ('': none from now on), most fields (0: any number),
--       entry of the audit log ('': none), entries kept, dropped ('': none), its entry of the audit log, audit log,
--       most_own (0: any number)
-- Answers: 1 done (also if done before) | 0 it has another value | -1 there are `most` | -2 there are `most_own`
-- include: _endpoints.lua
local now = redis.call('HGET', KEYS[1], ARGV[1]) or ''
if now == ARGV[3] then
  return 1
end
if now ~= ARGV[2] then
  return 0
end
local most, most_own, own = tonumber(ARGV[4]), tonumber(ARGV[10]), KEYS[2]
if own then
  endpoints_indexed(redis.call('HLEN', KEYS[1]))
  if now == '' and most_own > 0 and #endpoints_in({ own }) / 2 >= most_own then
    return -2
  end
end
if now == '' and most > 0 and redis.call('HLEN', KEYS[1]) >= most then
  if ARGV[7] == '' or redis.call('HDEL', KEYS[1], ARGV[7]) == 0 then
    return -1
  end
  redis.call('XADD', ARGV[9], 'MAXLEN', '~', ARGV[6], '*', 'e', ARGV[8])
end
if ARGV[3] == '' then
  redis.call('HDEL', KEYS[1], ARGV[1])
else
  redis.call('HSET', KEYS[1], ARGV[1], ARGV[3])
end
if own then
  redis.call(ARGV[3] == '' and 'SREM' or 'SADD', own, ARGV[1])
  redis.call('SET', ENDPOINTS .. ':indexed', redis.call('HLEN', KEYS[1]))
end
if ARGV[5] ~= '' then
  redis.call('XADD', ARGV[9], 'MAXLEN', '~', ARGV[6], '*', 'e', ARGV[5])
end
return 1
