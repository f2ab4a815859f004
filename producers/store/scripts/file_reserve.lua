#!lua
-- FILE_RESERVE(upload, bytes) | the tenant's files and the uploads of others have room for so many bytes: they are
-- reserved for the upload, in the place of what it had reserved, for `lease` seconds. Else nothing. Reservations that
-- are over go. Bytes that nobody has counted are added up from the tenant's list, and that is kept for a day.
-- KEYS: the tenant's files, their bytes, uploads
-- ARGV: upload's name, bytes, lease (s), most bytes, most files, most uploads (-1: any number)
-- Answers: {reserved | bytes | files | uploads (the limit that is reached), what the tenant has of it, with what other
--          uploads have reserved}
local now = tonumber(redis.call('TIME')[1])
local function over(number, most)
  return tonumber(most) >= 0 and number > tonumber(most)
end
local open, bytes = 0, 0
local uploads = redis.call('HGETALL', KEYS[3])
for i = 1, #uploads, 2 do
  local reserved, over_at = string.match(uploads[i + 1], '^(%d+) (%d+)$')
  if tonumber(over_at) <= now then
    redis.call('HDEL', KEYS[3], uploads[i])
  elseif uploads[i] ~= ARGV[1] then
    open, bytes = open + 1, bytes + tonumber(reserved)
  end
end
local kept = redis.call('GET', KEYS[2])
if not kept then
  kept = 0
  for _, id in ipairs(redis.call('ZRANGE', KEYS[1], 0, -1)) do
    kept = kept + (tonumber(redis.call('HGET', 'penstock:file:' .. id, 'size')) or 0)
  end
  if kept > 0 then
    redis.call('SET', KEYS[2], string.format('%.0f', kept), 'EX', 86400)
  end
end
if over(open + 1, ARGV[6]) then
  return { 'uploads', open }
end
local files = redis.call('ZCARD', KEYS[1]) + open
if over(files + 1, ARGV[5]) then
  return { 'files', files }
end
bytes = bytes + tonumber(kept)
if over(bytes + tonumber(ARGV[2]), ARGV[4]) then
  return { 'bytes', bytes }
end
redis.call('HSET', KEYS[3], ARGV[1], string.format('%.0f %.0f', ARGV[2], now + ARGV[3]))
redis.call('EXPIRE', KEYS[3], ARGV[3])
return { 'reserved', bytes }
