#!lua flags=no-writes
-- SIZES | the KV tokens that a queue's next messages may need: of the front of each list, and of what was sorted first;
-- reads only. What does not say its size (a plain Celery message) does not count.
-- KEYS: list, sorted, ...
-- ARGV: most messages of each
-- Answers: messages, tokens
local function said(raw)
  local fine, m = pcall(cjson.decode, raw)
  local headers = fine and type(m) == 'table' and m.headers
  local size = type(headers) == 'table' and headers.penstock
  return type(size) == 'table' and size.tokens
end

local count, total = 0, 0
local function add(tokens)
  if type(tokens) == 'number' and tokens > 0 and tokens < 2 ^ 53 then
    count, total = count + 1, total + tokens
  end
end

for k = 1, #KEYS, 2 do
  for _, raw in ipairs(redis.call('LRANGE', KEYS[k], -ARGV[1], -1)) do
    add(said(raw))
  end
  for _, packed in ipairs(redis.call('ZRANGE', KEYS[k + 1], 0, ARGV[1] - 1)) do
    add(cmsgpack.unpack(packed)[7])
  end
end
return { count, total }
