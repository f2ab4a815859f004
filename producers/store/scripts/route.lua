#!lua flags=allow-oom
-- ROUTE(n -> n + 1) | the model's routing has the generation n, and its card, where one comes with it, is the one that was
-- looked at: the routing has the new state, the former ones stay as its history, and the card becomes the new one; else
-- nothing. What it changes is also appended to the audit log, where ARGV says what to append.
-- KEYS: the model's routing, models
-- ARGV: model, n (0: it has none), new state (JSON), former card ('': the card stays), new card, states kept,
--       entry of the audit log ('': none), entries kept, audit log
-- Answers: 1 done (also if done before) | 0 it has another generation, or another card
local routing, models = KEYS[1], KEYS[2]
local model, n, state = ARGV[1], tonumber(ARGV[2]), ARGV[3]
if redis.call('HGET', routing, 'now') == state then
  return 1
end
if tonumber(redis.call('HGET', routing, 'generation') or '0') ~= n then
  return 0
end
if ARGV[4] ~= '' then
  if (redis.call('HGET', models, model) or '') ~= ARGV[4] then
    return 0
  end
  redis.call('HSET', models, model, ARGV[5])
end
redis.call('HSET', routing, 'generation', n + 1, 'now', state, 'at:' .. (n + 1), state)
redis.call('HDEL', routing, 'at:' .. (n + 1 - tonumber(ARGV[6])))
if ARGV[7] ~= '' then
  redis.call('XADD', ARGV[9], 'MAXLEN', '~', ARGV[8], '*', 'e', ARGV[7])
end
return 1
