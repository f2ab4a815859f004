#!lua flags=allow-oom
-- FOLD(age, most) | the oldest rows of the ledger, of ends longer ago than `age`, go, and are added to the sums of
-- their hours; `folded` is the last of them. One call, so that each row is counted once, as a row or in a sum.
-- KEYS: ledger, folded   ARGV: age (ms), most rows, then the fields that a sum counts, statuses first
-- Answers: the number of rows that went
-- include: _sums.lua
local before = string.format('%.0f', now_ms() - ARGV[1] - 1)
local rows = redis.call('XRANGE', KEYS[1], '-', before, 'COUNT', ARGV[2])
if #rows == 0 then
  return 0
end
local sums = {}
for _, row in ipairs(rows) do
  local f = {}
  for i = 1, #row[2], 2 do
    f[row[2][i]] = row[2][i + 1]
  end
  local start = math.floor(tonumber(string.match(row[1], '^%d+')) / 3600000) * 3600
  local group = cjson.encode({ f.key or '', f.tenant or '', f.model or '', f.version or '', f.tier or '' })
  local hour = sums[start] or {}
  local sum = hour[group] or {}
  for k = 3, #ARGV do
    local name = ARGV[k]
    sum[k - 2] = (sum[k - 2] or 0) + (f.status == name and 1 or tonumber(f[name] or '0') or 0)
  end
  hour[group], sums[start] = sum, hour
end
for start, hour in pairs(sums) do
  for group, sum in pairs(hour) do
    add('hour:' .. start, start, group, sum)
  end
end
local last = rows[#rows][1]
local ms, sequence = string.match(last, '^(%d+)-(%d+)$')
redis.call('SET', KEYS[2], last)
redis.call('XTRIM', KEYS[1], 'MINID', ms .. '-' .. string.format('%.0f', sequence + 1))
return #rows
