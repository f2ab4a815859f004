#!lua flags=no-writes
-- SIZES | the KV tokens that the next messages of lists may need, those that wait for longest first; reads only.
-- ARGV: most messages of each, list ...
-- Answers: messages, tokens
-- include: _index.lua
local now, count, total = clock(), 0, 0
for k = 2, #ARGV do
  for _, member in ipairs(redis.call('ZRANGEBYSCORE', 'penstock:sqs:waiting:' .. ARGV[k], '-inf', now, 'LIMIT', 0, ARGV[1])) do
    local tokens = tonumber(string.match(member, '^%S+ %S+ (%S+) ')) or 0
    if tokens > 0 then
      count, total = count + 1, total + tokens
    end
  end
end
return { count, total }
