#!lua flags=no-writes
-- STRAYS(inc, expected) | reads an incarnation's deliveries in flight that its worker does not know: a failover, or a
-- restart that lost the last second, restored deliveries that were acknowledged or given back.
-- KEYS: in flight of inc   ARGV: uuid, ... (known to the worker)
-- Answers: uuid, task id, ...
local held, out = {}, {}
for _, uuid in ipairs(ARGV) do
  held[uuid] = true
end
for _, uuid in ipairs(redis.call('HKEYS', KEYS[1])) do
  if not held[uuid] then
    out[#out + 1] = uuid
    out[#out + 1] = cmsgpack.unpack(redis.call('HGET', KEYS[1], uuid))[3]
  end
end
return out
