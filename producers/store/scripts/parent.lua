#!lua flags=allow-oom
-- PARENT | not final: its stream gets the entries of chunks that have completed, as when a chunk ends (a release before
-- this one ends chunks, too, and the store may lose some); one whose chunks are not all made, and of which none was for
-- so long, has lost its submitter: `failed`. Final: up to `most` of its chunks are cancelled; once all are, it leaves the
-- open parents.
-- KEYS: task, open parents   ARGV: id, for how long (ms), most
-- Answers: {the status then, 1: it stays open} | {gone, 0}
-- include: _final.lua
-- include: _cancel.lua
local task, id = KEYS[1], ARGV[1]
local r = redis.call('HMGET', task, 'status', 'chunks', 'written', 'written_at', 'tidied')
if not r[1] or not r[2] then
  redis.call('ZREM', KEYS[2], id)
  return { 'gone', 0 }
end
if not FINAL[r[1]] then
  if tonumber(r[3]) < tonumber(r[2]) and now_ms() - tonumber(r[4]) >= tonumber(ARGV[2]) then
    chunks_fail(task, id, 'failed', '[]',
      '{"code":"submit_failed","message":"The process that submitted this task was gone before it had written all of it."}')
  else
    chunks_join(task, id)
  end
end
local status = redis.call('HGET', task, 'status')
if FINAL[status] then
  local from, written = tonumber(r[5] or '0'), tonumber(r[3])
  local to = math.min(from + tonumber(ARGV[3]), written)
  chunks_each(id, from, to, function(chunk, name)
    cancel(chunk, 'penstock:stream:' .. name, name)
  end)
  redis.call('HSET', task, 'tidied', to)
  if to >= written then
    redis.call('ZREM', KEYS[2], id)
    return { status, 0 }
  end
end
return { status, 1 }
