-- Whether an incarnation has its lease that is listed with one of these queues; `takers` has them for its keys.
local function one_lives(incarnations, takers)
  local listed = redis.call('HGETALL', incarnations)
  for k = 1, #listed, 2 do
    if takers[listed[k + 1]] and redis.call('EXISTS', 'penstock:lease:' .. listed[k]) == 1 then
      return true
    end
  end
end

