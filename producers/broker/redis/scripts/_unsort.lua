-- Takes returned messages off the front of a list, the front first: number, message and task of each.
local function take_returned(list)
  local taken = {}
  while true do
    local raw = redis.call('LINDEX', list, -1)
    local fine, m = pcall(cjson.decode, raw)
    local id = fine and type(m) == 'table' and type(m.headers) == 'table' and m.headers.id
    local number = type(id) == 'string' and redis.call('HGET', 'penstock:returned', id)
    if not number then
      return taken
    end
    taken[#taken + 1] = { tonumber(number), redis.call('RPOP', list), id }
  end
end

-- Returns the last `count` sorted messages to the front of their list, in the order of their arrival, merged with the
-- returned messages that arrived among them, which need their numbers no more. Returned messages that arrived before
-- all of them stay in front with their numbers: older messages may still be sorted.
local function unsort(list, count)
  local sorted = 'penstock:sorted:' .. list
  local last, back, ahead = redis.call('ZRANGE', sorted, -count, -1), {}, {}
  for _, packed in ipairs(last) do
    local e = cmsgpack.unpack(packed)
    local turn = 'penstock:turn:' .. list .. ':' .. e[4]
    back[#back + 1] = { e[1], e[2], #back }
    redis.call('ZREM', turn, e[1])
    if redis.call('EXISTS', turn) == 0 then
      redis.call('ZREM', 'penstock:turns:' .. list, e[4])
    end
  end
  local oldest = back[1] and back[1][1]
  for _, r in ipairs(take_returned(list)) do
    if oldest and r[1] > oldest then
      back[#back + 1] = { r[1], r[2], #back }
      redis.call('HDEL', 'penstock:returned', r[3])
    else
      ahead[#ahead + 1] = r
    end
  end
  table.sort(back, function(a, b) return a[1] < b[1] or (a[1] == b[1] and a[3] < b[3]) end)
  for i = #back, 1, -1 do
    redis.call('RPUSH', list, back[i][2])
  end
  for i = #ahead, 1, -1 do
    redis.call('RPUSH', list, ahead[i][2])
  end
  redis.call('ZREMRANGEBYRANK', sorted, -count, -1)
  if redis.call('EXISTS', sorted) == 0 then
    redis.call('DEL', 'penstock:rested:' .. list)
  end
  return #last
end
