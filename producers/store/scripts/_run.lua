-- Shared by APPEND, FINISH and RELEASE. It keeps what a worker's engine did with a task (`producers.contract.record`).
-- `said`: the number of the task's start, a space, JSON; empty: no news.
local function note_run(task, said)
  local start, json = string.match(said, '^(%d+) (.+)$')
  if start then
    redis.call('HSET', task, 'run:' .. start, json)
  end
end
