-- Registers a request and reserves its place in the queue, if there is room; or finds the request that
-- was registered earlier under the same idempotency key.
-- KEYS[1] hash        tokenmill:request:<id>
-- KEYS[2] sorted set  tokenmill:waiting:<model>
-- KEYS[3] sorted set  tokenmill:open:<owner>: the owner's requests that may not have ended, by deadline
-- KEYS[4] hash        tokenmill:idempotency:<hash of key>, or no key
-- ARGV: id, a token of this call: the same call sent twice gets the same answer, queue limit, ms until
--       the deadline, ms the log outlives it, model, priority, digest of what is asked, prefix of the
--       requests' hashes, prefix of their logs, codes of the failures after which a request runs anew,
--       between commas, '1' if the request has an owner, how many the owner may have open (0: any number), then what the front end wants to find again beside the request: name, value, ...
-- Returns {'ok', deadline in ms} | {'full', requests waiting} | {'share', requests of the owner waiting}: that is all
--   that one owner may have of what is left of the queue | {'open', requests of the owner that have not ended} |
--   {'exists', 0} | {'reused', 0}: the key stands for something else | {'joined', id, state}: the key stands for this request
local earlier = redis.call('HMGET', KEYS[1], 'token', 'deadline')
if earlier[1] == ARGV[2] then
  return {'ok', tonumber(earlier[2])}
end
if redis.call('EXISTS', KEYS[1]) == 1 then
  return {'exists', 0}
end

-- Whether the log of a request that has ended says that it may be given again.
local function is_final(log_key)
  local last = redis.call('XREVRANGE', log_key, '+', '-', 'COUNT', 1)[1]
  if not last then
    return false
  end
  local readable, event = pcall(cjson.decode, last[2][2])
  if not readable or type(event) ~= 'table' then
    return false
  end
  if event.type == 'failed' then
    return not string.find(ARGV[11], ',' .. tostring(event.code) .. ',', 1, true)
  end
  return event.type == 'done'
end

if KEYS[4] then
  local reserved = redis.call('HMGET', KEYS[4], 'request', 'digest')
  local state = reserved[1] and redis.call('HGET', ARGV[9] .. reserved[1], 'state')
  if state then
    if reserved[2] ~= ARGV[8] then
      return {'reused', 0}
    end
    if state == 'queued' or state == 'running' or is_final(ARGV[10] .. reserved[1]) then
      return {'joined', reserved[1], state}
    end
  end
end

local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
redis.call('ZREMRANGEBYSCORE', KEYS[2], '-inf', now)
local depth = redis.call('ZCARD', KEYS[2])
if depth >= tonumber(ARGV[3]) then
  return {'full', depth}
end

-- The owner's requests that have not ended, and how many of them wait for this model. Those that have are forgotten.
local function open_requests()
  local waiting = 0
  for _, id in ipairs(redis.call('ZRANGE', KEYS[3], 0, -1)) do
    local state = redis.pcall('HGET', ARGV[9] .. id, 'state')
    if state ~= 'queued' and state ~= 'running' then
      redis.call('ZREM', KEYS[3], id)
    elseif redis.call('ZSCORE', KEYS[2], id) then
      waiting = waiting + 1
    end
  end
  return redis.call('ZCARD', KEYS[3]), waiting
end

local has_owner, most_open = ARGV[12] == '1', tonumber(ARGV[13])
if has_owner and type(redis.pcall('ZCARD', KEYS[3])) == 'table' then
  -- Somebody has put something else there, and nobody else would remove it.
  redis.call('DEL', KEYS[3])
end
if has_owner then
  local is_at_limit = most_open > 0 and redis.call('ZCARD', KEYS[3]) >= most_open
  -- One owner may have as many waiting as there are places left, so that there always are some for another. (Dynamic
  -- thresholds: Choudhury and Hahne, IEEE/ACM Transactions on Networking 6, 1998.)
  local is_crowded = depth * 2 >= tonumber(ARGV[3])
  if is_at_limit or is_crowded then
    local open, waiting = open_requests()
    if most_open > 0 and open >= most_open then
      return {'open', open}
    end
    if waiting >= tonumber(ARGV[3]) - depth then
      return {'share', waiting}
    end
  end
end

local deadline = now + tonumber(ARGV[4])
local ttl = tonumber(ARGV[4]) + tonumber(ARGV[5])
redis.call('ZADD', KEYS[2], deadline, ARGV[1])
if redis.call('PTTL', KEYS[2]) < tonumber(ARGV[4]) then
  redis.call('PEXPIRE', KEYS[2], ARGV[4])
end
redis.call('HSET', KEYS[1], 'state', 'queued', 'attempt', 0, 'deadline', deadline,
  'model', ARGV[6], 'priority', ARGV[7], 'log_ttl', ARGV[5], 'token', ARGV[2],
  'submitted_at', now, 'queued_at', now)
for i = 14, #ARGV, 2 do
  redis.call('HSET', KEYS[1], 'attribute:' .. ARGV[i], ARGV[i + 1])
end
redis.call('PEXPIRE', KEYS[1], ttl)
if has_owner then
  redis.call('ZREMRANGEBYSCORE', KEYS[3], '-inf', now)
  redis.call('ZADD', KEYS[3], deadline, ARGV[1])
  if redis.call('PTTL', KEYS[3]) < tonumber(ARGV[4]) then
    redis.call('PEXPIRE', KEYS[3], ARGV[4])
  end
end
if KEYS[4] then
  redis.call('HSET', KEYS[4], 'request', ARGV[1], 'digest', ARGV[8])
  redis.call('PEXPIRE', KEYS[4], ttl)
end
return {'ok', deadline}
