#!lua flags=allow-oom
-- CELERY_RESULT | stores a plain Celery task's result as Celery's own backend does, and tells whoever waits. A full store
-- takes it, too: the task's message and stream, which are larger, go only once it is there.
-- KEYS: the result's key, which is its channel, too   ARGV: result, seconds for which it is kept (0: for ever)
-- Answers: 1
if ARGV[2] == '0' then
  redis.call('SET', KEYS[1], ARGV[1])
else
  redis.call('SET', KEYS[1], ARGV[1], 'EX', ARGV[2])
end
redis.call('PUBLISH', KEYS[1], ARGV[1])
return 1
