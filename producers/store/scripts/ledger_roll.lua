#!lua flags=allow-oom
-- ROLL(age, most) | some sums of the oldest hour that began longer ago than `age` go, and are added to its day's. One
-- call, so that each is counted once.
-- KEYS: index of the sums   ARGV: age (s), about how many sums
-- Answers: the number of sums that went
-- include: _sums.lua
local before = math.floor(now_ms() / 1000) - ARGV[1]
for _, bucket in ipairs(redis.call('ZRANGEBYSCORE', KEYS[1], '-inf', '(' .. string.format('%.0f', before))) do
  local start = tonumber(string.match(bucket, '^hour:(%d+)$'))
  if start then
    local hour, day = 'penstock:usage:' .. bucket, math.floor(start / 86400) * 86400
    local found = redis.call('HSCAN', hour, 0, 'COUNT', ARGV[2])[2]
    for i = 1, #found, 2 do
      local counts = {}
      for number in string.gmatch(found[i + 1], '%d+') do
        counts[#counts + 1] = tonumber(number)
      end
      add('day:' .. string.format('%.0f', day), day, found[i], counts)
      redis.call('HDEL', hour, found[i])
    end
    if redis.call('EXISTS', hour) == 0 then
      redis.call('ZREM', KEYS[1], bucket)
    end
    return math.max(1, #found / 2)
  end
end
return 0
