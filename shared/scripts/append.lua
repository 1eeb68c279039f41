-- Fences, appends to the logs of requests and publishes, in one step: nothing is published that is not
-- in the log, and nothing that a newer attempt has overtaken gets into either.
-- KEYS[1] set  tokenmill:running:<worker>, then for each item
--   hash    tokenmill:request:<id>
--   stream  tokenmill:log:<id>
-- ARGV, for each item: id, channel, attempt, number of the first entry, state that this ends in (''
--   while it runs), how many events, events...
-- Returns for each item 1, also when these very entries were written before (a batch sent twice), 2 when
-- they were written and nobody listens, or 0 when this attempt no longer holds the request: or when something else
-- has been put in the place of the request or its log, and neither can be read or added to.
local function whole(text)
  return text and #text <= 15 and string.match(text, '^%d+$') and tonumber(text)
end

local function append(request_key, log_key, at)
  local attempt, ends_in = ARGV[at + 2], ARGV[at + 4]
  local seq, count = tonumber(ARGV[at + 3]), tonumber(ARGV[at + 5])
  local request = redis.pcall('HMGET', request_key, 'state', 'attempt', 'log_ttl', 'seq')
  local log_ttl, written = whole(request[3]), whole(request[4])
  if request[2] ~= attempt or not log_ttl or not written then
    return 0
  end
  if seq <= written then
    return 1
  end
  if request[1] ~= 'running' then
    return 0
  end
  redis.call('HSET', request_key, 'seq', seq + count - 1)
  local listeners = 0
  for i = 0, count - 1 do
    local id, event = attempt .. '-' .. (seq + i), ARGV[at + 6 + i]
    local added = redis.pcall('XADD', log_key, id, 'e', event)
    if type(added) == 'table' then
      return 0
    end
    listeners = redis.call('PUBLISH', ARGV[at + 1], id .. ' ' .. event)
  end
  if ends_in ~= '' then
    redis.call('HSET', request_key, 'state', ends_in)
    redis.call('PEXPIRE', request_key, log_ttl)
    redis.call('PEXPIRE', log_key, log_ttl)
    redis.call('SREM', KEYS[1], ARGV[at])
  elseif seq == 1 then
    redis.call('PEXPIRE', log_key, redis.call('PTTL', request_key))
  end
  return listeners > 0 and 1 or 2
end

local written = {}
local at = 1
for key = 2, #KEYS, 2 do
  written[#written + 1] = append(KEYS[key], KEYS[key + 1], at)
  at = at + 6 + tonumber(ARGV[at + 5])
end
return written
