#!lua flags=allow-oom
-- COUNT | adds to how often a sweeper did each of its duties. A full store keeps no sweeper from that, nor from what it
-- does behind it.
-- KEYS: counts (a hash)   ARGV: duty, number, ...
-- Answers: 1
for k = 1, #ARGV, 2 do
  redis.call('HINCRBY', KEYS[1], ARGV[k], ARGV[k + 1])
end
return 1
