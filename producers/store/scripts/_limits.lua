-- Shared by ADMIT, which charges a key's account for a task, and _final.lua, which settles the charge when the task ends.
-- An account is one hash (`producers/store/usage/limits.py`), so one script decides for all gateways. Minutes and months
-- are the server's, in UTC; a count of an earlier one is 0.

-- The number of the month of a time (ms): 12 a year, for the years 1970 to 2099.
local function month_of(now)
  local days = math.floor(now / 86400000)
  local function before(years)
    return 365 * years + math.floor((years + 1) / 4)
  end
  local years = math.floor(days / 365)
  if before(years) > days then
    years = years - 1
  end
  local left, month = days - before(years), 0
  local february = (years + 2) % 4 == 0 and 29 or 28
  for _, length in ipairs({ 31, february, 31, 30, 31, 30, 31, 31, 30, 31, 30 }) do
    if left < length then
      break
    end
    left, month = left - length, month + 1
  end
  return 12 * years + month
end

local function account_at(account, now)
  local r = redis.call('HMGET', account, 'minute', 'requests', 'tokens', 'open', 'reserved', 'month', 'spent')
  local a = { minute = math.floor(now / 60000), month = month_of(now) }
  local this_minute, this_month = tonumber(r[1]) == a.minute, tonumber(r[6]) == a.month
  a.requests, a.tokens = this_minute and tonumber(r[2]) or 0, this_minute and tonumber(r[3]) or 0
  a.open, a.reserved = tonumber(r[4]) or 0, tonumber(r[5]) or 0
  a.spent = this_month and tonumber(r[7]) or 0
  return a
end

local function keep(account, a)
  redis.call('HSET', account, 'minute', a.minute, 'requests', a.requests, 'tokens', a.tokens, 'open', a.open,
    'reserved', a.reserved, 'month', a.month, 'spent', a.spent)
  redis.call('EXPIRE', account, 5356800) -- 62 days: longer than the month that it counts
end

-- Charges for a task of so many tokens, if every limit allows it; else changes nothing.
-- Answers: {new | the limit that is reached, requests and tokens left (-1: no such limit), ms until the next minute}
local function charge(account, limits, tokens, now)
  local a, over = account_at(account, now), nil
  if limits.budget_tokens and a.spent + a.reserved + tokens > limits.budget_tokens then
    over = 'budget_tokens'
  elseif limits.max_in_flight and a.open >= limits.max_in_flight then
    over = 'max_in_flight'
  elseif limits.rpm and a.requests >= limits.rpm then
    over = 'rpm'
  elseif limits.tpm and a.tokens + tokens > limits.tpm then
    over = 'tpm'
  else
    a.requests, a.tokens, a.open, a.reserved = a.requests + 1, a.tokens + tokens, a.open + 1, a.reserved + tokens
    keep(account, a)
  end
  local requests = limits.rpm and math.max(0, limits.rpm - a.requests) or -1
  return { over or 'new', requests, limits.tpm and math.max(0, limits.tpm - a.tokens) or -1, 60000 - now % 60000 }
end

-- Puts what a task used in the place of what was reserved for it, once. created: when it was charged (ms).
local function settle_charge(account, reserved, used, created, now)
  local a = account_at(account, now)
  a.open, a.reserved = math.max(0, a.open - 1), math.max(0, a.reserved - reserved)
  a.spent = a.spent + used
  if math.floor(created / 60000) == a.minute then
    a.tokens = math.max(0, a.tokens + used - reserved)
  end
  keep(account, a)
end
