#!lua flags=no-writes
-- OLDEST | how long the oldest message of each list has waited since its task was submitted, by the front of the list
-- and its first sorted message; reads only. Messages without a time (plain Celery's) do not count.
-- KEYS: list, sorted, ...
-- Answers: ms, ... (by the clock of this server); -1 if unknown
-- include: producers.connection/_now.lua
local function submitted(raw)
  local fine, m = pcall(cjson.decode, raw)
  local headers = fine and type(m) == 'table' and m.headers
  local said = type(headers) == 'table' and headers.penstock
  local at = type(said) == 'table' and said.at
  return type(at) == 'number' and at > 0 and at or math.huge
end

local now = now_ms()
local out = {}
for k = 1, #KEYS, 2 do
  local raw, packed = redis.call('LINDEX', KEYS[k], -1), redis.call('ZRANGE', KEYS[k + 1], 0, 0)[1]
  local fine, e = pcall(cmsgpack.unpack, packed or '')
  local at = math.min(submitted(raw), submitted(fine and type(e) == 'table' and e[2]))
  out[#out + 1] = at < math.huge and math.max(0, now - at) or -1
end
return out
