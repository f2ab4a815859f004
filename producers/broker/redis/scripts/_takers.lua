-- include: producers.connection/_level.lua
-- Whether a live incarnation, of a release of at least this level, is listed with one of these queues (the keys of
-- `takers`).
local function one_lives(incarnations, takers, level)
  local listed = redis.call('HGETALL', incarnations)
  for k = 1, #listed, 2 do
    if takers[listed[k + 1]] and lives_at(listed[k], level) then
      return true
    end
  end
end

