-- Moves a job that was just queued to its owner's turn. Owners take turns, one job a round each, so that however many
-- jobs of one wait, another's first is behind one of them at most. It is start-time fair queueing (Goyal, Vin and Cheng,
-- "Start-time Fair Queueing", SIGCOMM 1996) with jobs that all count the same.
-- KEYS[1] list        RQ's queue
-- KEYS[2] sorted set  tokenmill:turns:<queue>: jobs by round
-- KEYS[3] hash        tokenmill:rounds:<queue>: the last round of each owner; under '' that of the queue, under '#' how
--                     many have come (no owner's name begins so)
-- ARGV: id, owner, ms that the sets live on
-- Returns the job's round, or -1 when it waits no more.
local function whole(text)
  return text and #text <= 15 and string.match(text, '^%d+$') and tonumber(text)
end

local head = redis.call('LINDEX', KEYS[1], 0)
if redis.call('LREM', KEYS[1], -1, ARGV[1]) == 0 then
  return -1
end
if redis.call('LLEN', KEYS[1]) == 0 then
  -- Nobody waited: what was before counts no more.
  redis.call('DEL', KEYS[2], KEYS[3])
end
-- A score is a round and, within it, the order of arrival: 21 bits of that, and fewer digits than a double has.
local ARRIVALS = 2097152
local function score(round, arrival)
  return string.format('%.0f', round * ARRIVALS + arrival % ARRIVALS)
end

local now = math.floor((whole(redis.call('ZSCORE', KEYS[2], head)) or 0) / ARRIVALS)
now = math.max(now, whole(redis.call('HGET', KEYS[3], '')) or 0)
local last = whole(redis.call('HGET', KEYS[3], ARGV[2]))
local round = last and math.max(now, last + 1) or now
redis.call('ZREMRANGEBYSCORE', KEYS[2], '-inf', '(' .. score(now, 0))

local is_placed = false
while not is_placed do
  local later = redis.call('ZRANGEBYSCORE', KEYS[2], score(round + 1, 0), '+inf', 'LIMIT', 0, 1)[1]
  if not later then
    redis.call('RPUSH', KEYS[1], ARGV[1])
    is_placed = true
  elseif redis.call('LINSERT', KEYS[1], 'BEFORE', later, ARGV[1]) > 0 then
    is_placed = true
  else
    -- It runs, or has been cancelled.
    redis.call('ZREM', KEYS[2], later)
  end
end
local arrival = (whole(redis.call('HGET', KEYS[3], '#')) or 0) + 1
redis.call('ZADD', KEYS[2], score(round, arrival), ARGV[1])
redis.call('HSET', KEYS[3], '', now, '#', arrival, ARGV[2], round)
redis.call('PEXPIRE', KEYS[2], ARGV[3])
redis.call('PEXPIRE', KEYS[3], ARGV[3])
return round
