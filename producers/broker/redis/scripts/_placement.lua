-- Placement (docs/how/placement.md): who holds which beginnings of prompts, and whom a message waits for. A prefix is the
-- marks of a prompt one after another, of 16 hexadecimal digits each, the shortest part first.
--   penstock:prefixes   hash, mark -> the incarnation that entered it last
--   penstock:held:INC   hash, each mark that INC holds -> 1; `room` -> its sequences and tokens of the four tiers that
--                       were free at the end of its last FETCH
-- A message is left to another incarnation only if that holds a longer part than is held here, has a lease, and had room
-- for it; and for a moment. Those behind it may overtake it then, and whenever more of them is held here: COUNT at most,
-- of the WINDOW oldest of its tenant. Nothing overtakes an order key. One call leaves LEAVES of them at most, so that its
-- work is bounded, however many tenants wait.
local MARK, MARKS, WINDOW, COUNT, LEAVES = 16, 16, 8, 4, 64
local me, at_ms, moment, rooms, known, some, look_again

local function prefix_of(said)
  local fine = type(said) == 'string' and #said <= MARK * MARKS and #said % MARK == 0
  return fine and not string.find(said, '[^0-9a-f]') and said or ''
end

-- Whether messages are placed at all. `inc`: empty if this incarnation does not; `ms`: for which a message is left.
local function begin_placing(inc, now, ms)
  me, at_ms, moment, rooms, known = inc, now, tonumber(ms), {}, {}
  return inc ~= '' and redis.call('EXISTS', 'penstock:prefixes') == 1
end

-- what an incarnation has room for, as it said last; false if its lease is gone or it has said nothing
local function room_of(inc)
  if rooms[inc] == nil then
    local said = redis.call('EXISTS', 'penstock:lease:' .. inc) == 1 and redis.call('HGET', 'penstock:held:' .. inc, 'room')
    local room = {}
    for figure in string.gmatch(said or '', '%S+') do
      room[#room + 1] = tonumber(figure)
    end
    rooms[inc] = #room == 8 and room
  end
  return rooms[inc]
end

-- how many marks of a message are held here, up to the longest part; and who holds a longer part and has room for it
local function held(m)
  if known[m.number] then
    return known[m.number][1], known[m.number][2]
  end
  local marks, here, other = {}, 0, nil
  for at = 1, #m.prefix, MARK do
    marks[#marks + 1] = string.sub(m.prefix, at, at + MARK - 1)
  end
  if marks[1] then
    local mine = redis.call('HMGET', 'penstock:held:' .. me, unpack(marks))
    local newest = redis.call('HMGET', 'penstock:prefixes', unpack(marks))
    for k = #marks, 1, -1 do
      if mine[k] then
        here = k
        break
      end
      local room = not other and newest[k] and newest[k] ~= me and room_of(newest[k])
      if room and room[1 + m.tier] >= m.seqs and room[5 + m.tier] >= m.tokens then
        other = newest[k]
      end
    end
  end
  known[m.number] = { here, other }
  return here, other
end

-- whether anything is held here
local function holds_some()
  if some == nil then
    some = redis.call('EXISTS', 'penstock:held:' .. me) == 1
  end
  return some
end

local function overtaken(m)
  return m.entry[11] or 0
end

-- the time (ms) for which a message may yet be left
local function patience(m)
  local since = m.entry[10]
  return since and since <= at_ms and since + moment - at_ms or moment -- later than now: the clock was set back
end

-- Notes that a message is passed over: left to another or not, overtaken by one or not.
local function pass_over(m, by, other)
  local e, sorted, left = m.entry, 'penstock:sorted:' .. m.list, patience(m)
  if by or not e[10] or e[10] > at_ms then
    e[11] = overtaken(m) + (by and 1 or 0)
    e[10] = other and at_ms + left - moment or e[10] or false
    e[12] = other or e[12] or false
    redis.call('ZREMRANGEBYSCORE', sorted, m.number, m.number)
    redis.call('ZADD', sorted, m.number, cmsgpack.pack(e))
  end
  if other then
    look_again = math.min(look_again or moment, left)
  end
end

local function say_room(seqs, tokens)
  if holds_some() then
    local room = {}
    for k = 0, 3 do
      room[1 + k], room[5 + k] = string.format('%d', seqs[k]), string.format('%d', tokens[k])
    end
    redis.call('HSET', 'penstock:held:' .. me, 'room', table.concat(room, ' '))
  end
end
