-- Shared by MADE and ADMIT. An entry that is over stays so: it would have no time to live.
local function made(entry)
  if redis.call('EXISTS', entry) == 0 then
    return 0
  end
  redis.call('HSET', entry, 'made', 1)
  return 1
end
