-- Shared by CLAIM and, on the broker, ADOPT and RECALL. Whether an incarnation has its lease, and its release can do what
-- needs this level (`producers/contract/levels.py`). A lease that says none is of a release without levels: 0.
local function lives_at(incarnation, level)
  local lease = redis.call('GET', 'penstock:lease:' .. incarnation)
  if not lease or level == 0 then
    return lease
  end
  local fine, about = pcall(cjson.decode, lease)
  return fine and type(about) == 'table' and type(about.level) == 'number' and about.level >= level
end
