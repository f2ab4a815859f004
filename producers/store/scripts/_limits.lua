-- Shared by ADMIT and BATCH_EXPAND, which charge accounts for a task, REFUSED, which charges them for a request that
-- became none, and _final.lua, which settles a task's charge at its end.
-- An account is one hash (`producers/store/usage/limits.py`), so one script decides for all gateways. Minutes and
-- months are the server's, in UTC; a count of an earlier one is 0.

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

-- The account as it counts now. A clock that is set back over the end of a month, or was ahead by less than one, begins
-- no new budget.
local function account_at(name, now)
  local r = redis.call('HMGET', name, 'minute', 'requests', 'tokens', 'open', 'reserved', 'month', 'spent',
    'pledged', 'paid')
  local a = { name = name, minute = math.floor(now / 60000), month = month_of(now) }
  if tonumber(r[6]) == a.month + 1 then
    a.month = a.month + 1
  end
  local this_minute, this_month = tonumber(r[1]) == a.minute, tonumber(r[6]) == a.month
  a.requests, a.tokens = this_minute and tonumber(r[2]) or 0, this_minute and tonumber(r[3]) or 0
  a.open, a.reserved = tonumber(r[4]) or 0, tonumber(r[5]) or 0
  a.spent = this_month and tonumber(r[7]) or 0
  a.pledged, a.paid = tonumber(r[8]) or 0, this_month and tonumber(r[9]) or 0
  return a
end

-- A number as a script's argument or JSON, whose own way loses digits of large ones.
local function whole(number)
  return string.format('%.0f', number)
end

-- What tokens cost, in billionths, rounded up. rates: 10^-12 a token of prompt, cached prompt and output; nil: nothing.
local function cost(rates, fresh, cached, output)
  return rates and math.ceil((fresh * rates[1] + cached * rates[2] + output * rates[3]) / 1000) or 0
end

-- The most that a task may cost whose choices make `output` tokens. No token of its prompt may be cached, or all.
local function most_cost(asked, output)
  local r = asked.rates
  return r and cost({ math.max(r[1], r[2]), 0, r[3] }, asked.prompt, 0, asked.width * output) or 0
end

-- The most that a task may need whose choices make `output` tokens: tokens, and what they cost.
local function most(asked, output)
  return asked.prompt + asked.width * output, most_cost(asked, output)
end

-- The same of all tasks of its request, where that is said.
local function most_of_all(asked)
  if not asked.all then
    return 0, 0
  end
  return most({ prompt = asked.all[1], width = 1, rates = asked.rates }, asked.all[2])
end

-- It has no TTL while tasks are open. Then it is kept for 62 days: longer than the month that it counts.
local function keep(a, opened)
  redis.call('HSET', a.name, 'minute', a.minute, 'requests', a.requests, 'tokens', a.tokens, 'open', a.open,
    'reserved', a.reserved, 'month', a.month, 'spent', a.spent,
    'pledged', whole(a.pledged), 'paid', whole(a.paid))
  if a.open == 0 then
    redis.call('EXPIRE', a.name, 5356800)
  elseif opened and a.open == 1 then
    redis.call('PERSIST', a.name)
  end
end

-- The most tokens that each choice may make by these budgets, as far as `asked.output`; below 0 for none.
local function room(a, limits, asked)
  local output = asked.output
  if limits.budget_tokens then
    local left = limits.budget_tokens - a.spent - a.reserved - asked.prompt
    output = math.min(output, math.floor(left / asked.width))
  end
  if limits.budget_money and asked.rates[3] > 0 then
    local left = limits.budget_money - a.paid - a.pledged
    output = math.min(output, math.floor((left - most_cost(asked, 0)) * 1000 / (asked.width * asked.rates[3])))
  end
  return output
end

-- The limit that keeps an account from being charged for a task whose choices make `output` tokens; nil for none.
-- `reserved`: a budget has enough left, for all tasks of the request, once tasks have ended that use less than was
-- reserved for them.
local function over(a, limits, asked, output)
  local need, money = most(asked, output)
  local all_need, all_money = most_of_all(asked)
  if limits.budget_tokens and a.spent + math.max(need, all_need) > limits.budget_tokens then
    return 'budget_tokens'
  elseif limits.budget_money and a.paid + math.max(money, all_money) > limits.budget_money then
    return 'budget_money'
  elseif limits.budget_tokens and a.spent + a.reserved + need > limits.budget_tokens then
    return 'reserved'
  elseif limits.budget_money and a.paid + a.pledged + money > limits.budget_money then
    return 'reserved'
  elseif limits.max_in_flight and a.open >= limits.max_in_flight then
    return 'max_in_flight'
  elseif limits.rpm and a.requests >= limits.rpm then
    return 'rpm'
  elseif limits.tpm and a.tokens + asked.tokens > limits.tpm then
    return 'tpm'
  end
end

-- What callers are told of their accounts: {said, whose, ms until the next minute, then for requests and for tokens of
-- a minute what is left, and of how many (-1: no such limit), of the account with the least}.
local function told(said, whose, accounts, limits, now)
  local answer = { said, whose, 60000 - now % 60000, -1, -1, -1, -1 }
  local function tell(at, most, used)
    local left = most and math.max(0, most - used)
    if most and (answer[at + 1] < 0 or left < answer[at]) then
      answer[at], answer[at + 1] = left, most
    end
  end
  for i, a in ipairs(accounts) do
    tell(4, limits[i].rpm, a.requests)
    tell(6, limits[i].tpm, a.tokens)
  end
  return answer
end

-- Charges all accounts for a request that was refused after work. A limit that is reached keeps none from that.
local function charge_refused(names, limits, now)
  local accounts, whose = {}, -1
  for i, name in ipairs(names) do
    local a = account_at(name, now)
    a.requests = a.requests + 1
    keep(a)
    accounts[i] = a
    if whose < 0 and limits[i].rpm and a.requests >= limits[i].rpm then
      whose = i - 1
    end
  end
  return told('refused', whose, accounts, limits, now)
end

-- Charges all accounts for a task, if every limit of each allows it; else changes nothing. A task of `asked.least`
-- below `asked.output` may be shortened to what is left of a budget.
-- asked: limits (of each account), tokens (estimated, for `tpm`), prompt, output, least (tokens of a choice), width,
--        rates (of `cost`; there if a limit is `budget_money`), all (tokens of prompts, and least ones of outputs, of
--        all tasks of its request; there if they are taken together or not at all)
-- Answers: what `told` does of {new | the limit that is reached, which account's (from 0)}; the record's `reserved`;
--          the task's output, if it is shortened
local function charge(names, asked, now)
  local accounts, output = {}, asked.output
  for i, name in ipairs(names) do
    accounts[i] = account_at(name, now)
    output = math.min(output, room(accounts[i], asked.limits[i], asked))
  end
  output = math.max(output, asked.least)
  local said, whose
  for i, a in ipairs(accounts) do
    said, whose = over(a, asked.limits[i], asked, output), i - 1
    if said then
      break
    end
  end
  local reserved, pledged = most(asked, output)
  if not said then
    for _, a in ipairs(accounts) do
      a.requests, a.tokens = a.requests + 1, a.tokens + asked.tokens
      a.open, a.reserved, a.pledged = a.open + 1, a.reserved + reserved, a.pledged + pledged
      keep(a, true)
    end
  end
  local answer = told(said or 'new', whose, accounts, asked.limits, now)
  local kept = cjson.encode({ accounts = names, estimate = asked.tokens, tokens = reserved,
    money = asked.rates and whole(pledged), rates = asked.rates })
  return answer, kept, output < asked.output and output or nil
end

-- Adds what `charge` answered to a record's fields.
local function charged_fields(fields, reserved, shortened)
  fields[#fields + 1] = 'reserved'
  fields[#fields + 1] = reserved
  if shortened then
    fields[#fields + 1] = 'max_output'
    fields[#fields + 1] = shortened
  end
end

-- What a record's `reserved` says. A bare number is of a gateway before accounts had names: it charged the task's key.
local function charged_for(task, kept)
  local tokens = tonumber(kept)
  if not tokens then
    return cjson.decode(kept)
  end
  local key = redis.call('HGET', task, 'key')
  return { accounts = key and { 'penstock:limits:' .. key } or {}, tokens = tokens, estimate = tokens }
end

-- Puts what a task used in the place of what was reserved for it, once. created: when it was charged (ms).
local function settle_charge(task, kept, prompt, cached, output, created, now)
  local charged, used = charged_for(task, kept), prompt + output
  local paid = cost(charged.rates, prompt - cached, cached, output)
  for _, name in ipairs(charged.accounts) do
    local a = account_at(name, now)
    a.open, a.reserved = math.max(0, a.open - 1), math.max(0, a.reserved - charged.tokens)
    a.pledged = math.max(0, a.pledged - (tonumber(charged.money) or 0))
    a.spent, a.paid = a.spent + used, a.paid + paid
    if math.floor(created / 60000) == a.minute then
      a.tokens = math.max(0, a.tokens + used - charged.estimate)
    end
    keep(a)
  end
end
