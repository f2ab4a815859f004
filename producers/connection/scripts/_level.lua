-- Shared by CLAIM and, on the broker, ADOPT and RECALL. Whether an incarnation has its lease, and its release can do what
-- needs this level (`producers/contract/levels.py`). A lease that says none is of a release without levels: 0.
local function lives_at(incarnation, level)
  local lease = redis.call('GET', 'penstock:lease:' .. incarnation)
  if not lease or level == 0 then
    return lease
  end
  -- Not decoded: that takes 0.2 ms, and a version may have hundreds of workers. A quote within a value is escaped.
  return (tonumber(string.match(lease, '"level": ?(%d+)[,}]') or nil) or 0) >= level
end

-- The own queues of a version's pools.
local function pools_of(queue)
  local found = {}
  for _, pool in ipairs(redis.call('HKEYS', 'penstock:pools')) do
    if string.sub(pool, 1, #queue + 1) == queue .. '.' then
      found[#found + 1] = pool
    end
  end
  return found
end
