-- What came back is at the front of its list, to be sorted to where it stood: it is taken off, the front first.
local function take_returned(list)
  local taken = {}
  while true do
    local raw = redis.call('LINDEX', list, -1)
    local fine, m = pcall(cjson.decode, raw)
    local id = fine and type(m) == 'table' and type(m.headers) == 'table' and m.headers.id
    if type(id) ~= 'string' or redis.call('HEXISTS', 'penstock:returned', id) == 0 then
      return taken
    end
    taken[#taken + 1] = redis.call('RPOP', list)
  end
end

-- The last `count` of what was sorted go back to the front of their list, in the order of their arrival.
local function unsort(list, count)
  local sorted = 'penstock:sorted:' .. list
  local last, returned = redis.call('ZRANGE', sorted, -count, -1), take_returned(list)
  for i = #last, 1, -1 do
    local e = cmsgpack.unpack(last[i])
    local turn = 'penstock:turn:' .. list .. ':' .. e[4]
    redis.call('RPUSH', list, e[2])
    redis.call('ZREM', turn, e[1])
    if redis.call('EXISTS', turn) == 0 then
      redis.call('ZREM', 'penstock:turns:' .. list, e[4])
    end
  end
  for i = #returned, 1, -1 do
    redis.call('RPUSH', list, returned[i])
  end
  redis.call('ZREMRANGEBYRANK', sorted, -count, -1)
  if redis.call('EXISTS', sorted) == 0 then
    redis.call('DEL', 'penstock:rested:' .. list)
  end
  return #last
end
