-- Removes all that an incarnation has entered of what it holds (see _placement.lua).
local function unhold(inc)
  local mine, marks = 'penstock:held:' .. inc, {}
  for _, mark in ipairs(redis.call('HKEYS', mine)) do
    if redis.call('HGET', 'penstock:prefixes', mark) == inc then
      marks[#marks + 1] = mark
    end
    if #marks == 1000 then
      redis.call('HDEL', 'penstock:prefixes', unpack(marks))
      marks = {}
    end
  end
  if marks[1] then
    redis.call('HDEL', 'penstock:prefixes', unpack(marks))
  end
  redis.call('DEL', mine)
end
