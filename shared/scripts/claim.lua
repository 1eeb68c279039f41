-- Takes a queued request for a worker and gives it the next attempt number.
-- A request that another live worker runs, or that has ended, is refused.
-- KEYS[1] hash        tokenmill:request:<id>
-- KEYS[2] sorted set  tokenmill:waiting:<model>
-- KEYS[3] set         tokenmill:running:<worker>
-- KEYS[4] set         tokenmill:workers: the reaper must know of whoever holds something, be it that its lease
--                     ran out and it was buried before it came to claim
-- ARGV: id, worker, prefix of the workers' lease keys, ms that the sets outlive a worker, a token
--       of this call: the same call sent twice gets the same answer, after how many deaths of workers
--       it may only run alone, 1 if nothing else runs on this worker
-- A request of which what is needed cannot be read is gone.
-- Returns {'claimed', attempt, ms until the deadline, deaths, ms since the request was submitted, ms that it waited
--   since then or since the attempt before ended, the worker that died while it ran the attempt before or '', ms that
--   it had run there} | {'gone' | 'ended' | 'running' | 'expired' | 'alone': it must, and something else runs}
local function whole(text)
  return text and #text <= 15 and string.match(text, '^%d+$') and tonumber(text)
end

local request = redis.pcall('HMGET', KEYS[1], 'state', 'worker', 'deadline', 'claim', 'attempt', 'deaths',
  'submitted_at', 'queued_at', 'claimed_at', 'died', 'ran')
local state, deadline, attempts = request[1], whole(request[3]), whole(request[5])
if not state or not deadline or not attempts then
  return {'gone'}
end
if state ~= 'queued' and state ~= 'running' then
  return {'ended'}
end
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local remaining = deadline - now
local submitted_at, queued_at = whole(request[7]) or now, whole(request[8]) or now
local claimed_at = whole(request[9]) or now
local died, ran = request[10] or '', whole(request[11]) or 0
local deaths = whole(request[6]) or 0
if state == 'running' then
  if request[4] == ARGV[5] then
    return {'claimed', attempts, remaining, deaths, now - submitted_at, claimed_at - queued_at, died, ran}
  end
  local owner = request[2] or ''
  if redis.call('EXISTS', ARGV[3] .. owner) == 1 then
    return {'running'}
  end
  -- Its worker is dead, and no reaper has come by.
  died, ran, queued_at = owner, now - claimed_at, now
end
if remaining <= 0 then
  return {'expired'}
end
if deaths >= tonumber(ARGV[6]) and ARGV[7] ~= '1' then
  return {'alone'}
end
local attempt = redis.call('HINCRBY', KEYS[1], 'attempt', 1)
redis.call('HSET', KEYS[1], 'state', 'running', 'worker', ARGV[2], 'claim', ARGV[5], 'seq', 0,
  'queued_at', queued_at, 'claimed_at', now, 'died', died, 'ran', ran)
redis.call('ZREM', KEYS[2], ARGV[1])
redis.call('SADD', KEYS[3], ARGV[1])
redis.call('PEXPIRE', KEYS[3], ARGV[4])
redis.call('SADD', KEYS[4], ARGV[2])
redis.call('PEXPIRE', KEYS[4], ARGV[4])
return {'claimed', attempt, remaining, deaths, now - submitted_at, now - queued_at, died, ran}
