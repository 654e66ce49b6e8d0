"""Lua of the index in Redis: what a prompt asks for, and what a holder tells, in one round trip each (redis_index.py calls).

An entry is one key for a block or picture, `prefix .. kind .. digest`; its value is a MessagePack array of holders, each
followed by the second (of the server's clock) from which it counts no more, oldest first. Digests come packed, 32 bytes each.
The names of keys are made here and not listed in KEYS, since a thousand arguments would take the client a millisecond; so this
is for one server, not for Redis Cluster.
"""

from __future__ import annotations

_LIVE = """
local now = tonumber(redis.call('TIME')[1])

local function live_in(value)  -- holders and ends that still count; nothing when there is no value, or somebody else's
  local is_entry, entry = pcall(cmsgpack.unpack, value)
  local holders, ends = {}, {}
  for i = 1, is_entry and type(entry) == 'table' and #entry or 0, 2 do
    local ends_at = tonumber(entry[i + 1])
    if type(entry[i]) == 'string' and ends_at and ends_at > now then
      holders[#holders + 1], ends[#ends + 1] = entry[i], ends_at
    end
  end
  return holders, ends
end
"""

# KEYS[1] prefix; ARGV: block keys, mm_hashes. Returns MessagePack of {{holder, num_blocks}, ...} and {holders of each mm_hash}.
LOOKUP = (
    _LIVE
    + """
local cached_value, cached_holders

local function holders_in(value)
  if value ~= cached_value then  -- blocks of one prompt have mostly equal values
    cached_value, cached_holders = value, live_in(value)
  end
  return cached_holders
end

local function entries(kind, digests, first)  -- 64 at a time: a prefix that ends early costs no more
  local names = {}
  for i = first * 32 + 1, math.min(#digests, (first + 64) * 32), 32 do
    names[#names + 1] = KEYS[1] .. kind .. string.sub(digests, i, i + 31)
  end
  return redis.call('MGET', unpack(names))
end

local num_blocks, lengths = #ARGV[1] / 32, {}
local index, is_unbroken = 0, true
while is_unbroken and index < num_blocks do
  for _, value in ipairs(entries('k', ARGV[1], index)) do
    is_unbroken = false
    for _, holder in ipairs(holders_in(value)) do
      if (lengths[holder] or 0) == index then
        lengths[holder] = index + 1
        is_unbroken = true
      end
    end
    if not is_unbroken then break end
    index = index + 1
  end
end
local prefixes = {}
for holder, length in pairs(lengths) do prefixes[#prefixes + 1] = {holder, length} end

local embeddings = {}
for first = 0, #ARGV[2] / 32 - 1, 64 do
  for _, value in ipairs(entries('e', ARGV[2], first)) do
    embeddings[#embeddings + 1] = holders_in(value)
  end
end
return cmsgpack.pack({prefixes, embeddings})
"""
)

# KEYS[1] prefix; ARGV: holder, ttl_s, most holders of an entry, then what it holds and what it has dropped: blocks, pictures.
UPDATE = (
    _LIVE
    + """
local holder, ttl_s, max_holders = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3])

local function others_in(value)
  local holders, ends = live_in(value)
  local others = {}
  for i = 1, #holders do
    if holders[i] ~= holder then
      others[#others + 1] = holders[i]
      others[#others + 1] = ends[i]
    end
  end
  return others
end

local function update(kind, digests, is_held)
  for i = 1, #digests, 32 do
    local name = KEYS[1] .. kind .. string.sub(digests, i, i + 31)
    local entry = others_in(redis.pcall('GET', name))
    if is_held then
      while #entry > 2 * (max_holders - 1) do
        table.remove(entry, 1)
        table.remove(entry, 1)
      end
      entry[#entry + 1] = holder
      entry[#entry + 1] = now + ttl_s
      redis.call('SET', name, cmsgpack.pack(entry), 'EX', ttl_s)
    elseif #entry > 0 then
      redis.call('SET', name, cmsgpack.pack(entry), 'KEEPTTL')
    else
      redis.call('DEL', name)
    end
  end
end

update('k', ARGV[4], true)
update('k', ARGV[5], false)
update('e', ARGV[6], true)
update('e', ARGV[7], false)
"""
)
