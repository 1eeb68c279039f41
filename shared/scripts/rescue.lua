-- Puts a job that a worker took and never claimed back at the head of its queue; a job of which nothing
-- is left but its id is dropped.
-- KEYS[1] list  RQ's intermediate queue
-- KEYS[2] list  RQ's queue
-- KEYS[3] hash  RQ's job
-- ARGV: job id
-- Returns 1 if the job is queued again.
if redis.call('LREM', KEYS[1], 1, ARGV[1]) == 0 then
  return 0
end
if redis.pcall('HEXISTS', KEYS[3], 'data') ~= 1 then
  return 0
end
redis.call('LPUSH', KEYS[2], ARGV[1])
return 1
