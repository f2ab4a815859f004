-- Of ADMIT. The bound on what waits that so many more tasks would exceed: {full, its name, what waits, the most}; nil: none.
-- places: of each bound the hash that counts, the fields that add up, the most, its name
--         (`producers/store/waiting.py`).
local function waiting_full(places, more)
  for _, place in ipairs(places) do
    local waits = 0
    for _, count in ipairs(redis.call('HMGET', place[1], unpack(place[2]))) do
      waits = waits + (count or 0)
    end
    if waits + more > place[3] then
      return { 'full', place[4], waits, place[3] }
    end
  end
end
