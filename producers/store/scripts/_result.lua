-- Shared by what removes a task. Its compacted stream is gone; if a blob holds that, a note says that it is to be
-- deleted.
local function drop_result(id)
  local result = 'penstock:result:' .. id
  local reference = redis.call('HGET', result, 'blob')
  if reference then
    redis.call('ZADD', 'penstock:files:notes', 0, cjson.decode(reference).name)
  end
  redis.call('UNLINK', result)
end
