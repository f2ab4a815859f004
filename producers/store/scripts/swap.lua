#!lua flags=allow-oom
-- SWAP(old -> new) | the field has the value `old`: it has `new`; else nothing. A new field where there are `most`: nothing.
-- KEYS: hash   ARGV: field, old ('': there is no field), new, most fields (0: any number)
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
redis.call('HSET', KEYS[1], ARGV[1], ARGV[3])
return 1
