-- Gives a running request back to the queue, at its head, so that another attempt carries it on. The attempt
-- that ran it is fenced: the request does not run any more.
-- KEYS[1] hash        tokenmill:request:<id>
-- KEYS[2] sorted set  tokenmill:waiting:<model>
-- KEYS[3] set         tokenmill:running:<worker>
-- KEYS[4] list        RQ's queue
-- KEYS[5] list        RQ's intermediate queue
-- KEYS[6] sorted set  RQ's started registry
-- KEYS[7] hash        RQ's job
-- KEYS[8] sorted set  RQ's executions of the job
-- ARGV: id, worker that must hold it, 1 if that worker died of something, how many deaths are too many, prefix of
--   the keys of RQ's executions
-- Returns 'queued' | 'poison': it has ended too many workers, and is left as it is | 'jobless': there is no
--   job to queue, and it is left as it is | 'lost': it is not, or no longer, that worker's, or unreadable
local function whole(text)
  return text and #text <= 15 and string.match(text, '^%d+$') and tonumber(text)
end

local request = redis.pcall('HMGET', KEYS[1], 'state', 'worker', 'deadline', 'claimed_at', 'deaths')
local deadline = whole(request[3])
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
if request[1] ~= 'running' or request[2] ~= ARGV[2] or not deadline then
  return 'lost'
end
if redis.pcall('HEXISTS', KEYS[7], 'data') ~= 1 then
  return 'jobless'
end
local died = ARGV[3] == '1'
local deaths = (whole(request[5]) or 0) + (died and 1 or 0)
if died and deaths >= tonumber(ARGV[4]) then
  redis.call('HSET', KEYS[1], 'deaths', deaths)
  return 'poison'
end
-- First what all share, which fails when it is of another type: nothing has been changed then that a second try needs.
redis.call('LREM', KEYS[5], 0, ARGV[1])
redis.call('LREM', KEYS[4], 0, ARGV[1])
redis.call('LPUSH', KEYS[4], ARGV[1])
redis.call('SREM', KEYS[3], ARGV[1])
redis.call('ZADD', KEYS[2], deadline, ARGV[1])
local ttl = redis.call('PTTL', KEYS[1])
if redis.call('PTTL', KEYS[2]) < ttl then
  redis.call('PEXPIRE', KEYS[2], ttl)
end
redis.call('HSET', KEYS[1], 'state', 'queued', 'queued_at', now, 'deaths', deaths,
  'died', died and ARGV[2] or '', 'ran', now - (whole(request[4]) or now))
redis.call('HDEL', KEYS[1], 'worker', 'claim')
for _, member in ipairs(redis.pcall('ZRANGE', KEYS[6], 0, -1)) do
  if string.sub(member, 1, #ARGV[1] + 1) == ARGV[1] .. ':' then
    redis.call('ZREM', KEYS[6], member)
    redis.call('DEL', ARGV[5] .. member)
  end
end
redis.call('DEL', KEYS[8])
redis.call('HSET', KEYS[7], 'status', 'queued')
redis.call('HDEL', KEYS[7], 'worker_name', 'started_at')
return 'queued'
