#!lua
-- NOTE(inc, messages) | lease present: enter each received message in flight, in its worker's buffer, and remove it
-- from its list's index; else nothing. A known message is a copy of one that the worker has: its entry is replaced, if
-- it exists and has no route out.
-- KEYS: lease, in flight of inc, reaped
-- ARGV: list, then for each message its field, entry (JSON), member of the index (or empty), task id, known 0|1
-- Answers: {-1} without a lease; else each message's redeliveries whose worker died
-- include: _index.lua
if redis.call('EXISTS', KEYS[1]) == 0 then
  return { -1 }
end
local out = {}
for k = 2, #ARGV, 5 do
  local had = ARGV[k + 4] == '1' and redis.call('HGET', KEYS[2], ARGV[k])
  if ARGV[k + 4] == '0' or (had and not cjson.decode(had).out) then
    redis.call('HSET', KEYS[2], ARGV[k], ARGV[k + 1])
    if ARGV[k + 2] ~= '' then
      leave(ARGV[1], ARGV[k + 2])
    end
  end
  out[#out + 1] = tonumber(redis.call('HGET', KEYS[3], ARGV[k + 3]) or '0')
end
return out
