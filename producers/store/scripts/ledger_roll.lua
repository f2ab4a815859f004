#!lua flags=allow-oom
-- ROLL(age, most) | some sums of the oldest hour that began longer ago than `age` go, and are added to its day's. Sums
-- of an earlier release, which had those of all tenants in one hash, go first, and are added to their tenants'. One
-- call, so that each is counted once.
-- KEYS: index of the sums, the same of an earlier release's   ARGV: age (s), about how many sums
-- Answers: the number of sums that went; at least 1 while there is such an hour
-- include: _sums.lua

-- Moves some sums of a hash to a bucket. Answers: how many
local function move(from, bucket, start)
  local found = redis.call('HSCAN', from, 0, 'COUNT', ARGV[2])[2]
  for i = 1, #found, 2 do
    local counts = {}
    for number in string.gmatch(found[i + 1], '%d+') do
      counts[#counts + 1] = tonumber(number)
    end
    add(bucket, start, found[i], counts)
    redis.call('HDEL', from, found[i])
  end
  return #found / 2
end

for _, bucket in ipairs(redis.call('ZRANGE', KEYS[2], 0, 0)) do
  local from = 'penstock:usage:' .. bucket
  local moved = move(from, bucket, tonumber(string.match(bucket, '%d+$')))
  if redis.call('EXISTS', from) == 0 then
    redis.call('ZREM', KEYS[2], bucket)
  end
  return math.max(1, moved)
end
local before = math.floor(now_ms() / 1000) - ARGV[1]
for _, bucket in ipairs(redis.call('ZRANGEBYSCORE', KEYS[1], '-inf', '(' .. string.format('%.0f', before))) do
  local start = tonumber(string.match(bucket, '^hour:(%d+)$'))
  if start then
    local day, moved = math.floor(start / 86400) * 86400, 0
    local tenants = 'penstock:usage:tenants:' .. bucket
    for _, tenant in ipairs(redis.call('SMEMBERS', tenants)) do
      local hour = 'penstock:usage:sums:' .. bucket .. ':' .. tenant
      moved = moved + move(hour, 'day:' .. string.format('%.0f', day), day)
      if redis.call('EXISTS', hour) == 0 then
        redis.call('SREM', tenants, tenant)
      end
      if moved >= tonumber(ARGV[2]) then
        break
      end
    end
    if redis.call('EXISTS', tenants) == 0 then
      redis.call('ZREM', KEYS[1], bucket)
    end
    return math.max(1, moved)
  end
end
return 0
