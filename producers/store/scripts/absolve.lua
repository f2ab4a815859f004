#!lua flags=allow-oom
-- ABSOLVE(inc) | CLAIM counted a death of this owner, who lives: it is counted no more, and its entry in `lost` goes.
-- `stuck` counts the last ones of `lost`. Where more died than `lost` keeps, nothing is known of the rest.
-- KEYS: task   ARGV: inc
-- Answers: 1 taken back | 0 there is none
local r = redis.call('HMGET', KEYS[1], 'lost', 'deaths', 'stuck')
local lost = cjson.decode(r[1] or '[]')
local deaths, stuck = tonumber(r[2] or '0'), tonumber(r[3] or '0')
for k, one in ipairs(lost) do
  if one.owner == ARGV[1] then
    if k > deaths - stuck then
      redis.call('HINCRBY', KEYS[1], 'stuck', -1)
    end
    table.remove(lost, k)
    redis.call('HINCRBY', KEYS[1], 'deaths', -1)
    if lost[1] then
      redis.call('HSET', KEYS[1], 'lost', cjson.encode(lost))
    else
      redis.call('HDEL', KEYS[1], 'lost')
    end
    return 1
  end
end
return 0
