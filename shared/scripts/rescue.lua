-- Puts a job that a worker took and never claimed back at the head of its queue.
-- KEYS[1] list  RQ's intermediate queue
-- KEYS[2] list  RQ's queue
-- ARGV: job id
-- Returns 1 if the job was there.
if redis.call('LREM', KEYS[1], 1, ARGV[1]) == 0 then
  return 0
end
redis.call('LPUSH', KEYS[2], ARGV[1])
return 1
