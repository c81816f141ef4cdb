"""Device code: the kernel of verification and the one that writes out uniforms.

Each work-group walks the drafts of its sequence to their first stop and adds up the weights of its slice of the row
that the draw uses; the last one to finish turns the sums and a uniform into a token. Weights are integers in units of
2**-44, so every sum here is exact and no order of addition, work-group size or number of slices changes a result. A
greedy sequence is walked by one work-group, row by row.

The kernel is compiled for each pair of element types of the draft's and the target's rows, which `load` widens.

numba widens int32 arithmetic to int64 and any float literal to float64, which many Intel GPUs lack: constants and
intermediate values are wrapped in their 32-bit type at each step.
"""

import numba_dpex as dpex
import numpy as np

from specverify_dpex.constants import (
    DETERMINISTIC_MASK,
    DRAFT_PROBS,
    GREEDY_MASK,
    INT32_NUM_DRAFT,
    INT32_TOKENS,
    MAX_VOCAB,
    NUM_DRAFT,
    PHILOX_ACCEPT,
    PHILOX_ROW_KEYS,
    PHILOX_SAMPLE,
    STREAM_ACCEPT,
    STREAM_SAMPLE,
)
from specverify_dpex.intrinsics import (
    as_int32,
    at,
    atomic_increment,
    bits_of,
    fma,
    group_barrier,
    group_id,
    group_max,
    group_min,
    group_scan,
    group_sum,
    load,
    local_id,
    local_size,
    num_groups,
)

# A weight in units of 2**-44 has two limbs, multiples of 2**25 units and what is left of them.
WEIGHT_SCALE = np.float32(2.0**44)
LOW_BITS = np.uint64(25)
# Sums of upper limbs begin here, where the last bit of a float32 is worth 2**25: what is added is rounded to multiples
# of that. Up to twice this number, which is 16 weights of 1 away, the bits of a sum count them.
UPPER_ZERO = np.float32(2.0**48)
UPPER_ZERO_BITS = np.uint32(0x57800000)

# Sums of 64 bits are added up over a work-group in three limbs.
LIMB_BITS = np.uint64(22)
LIMB_MASK = np.uint64(2**22 - 1)
# Work-items that read side by side in the draw's search of a tile: those of a GPU's vector share cache lines then.
TEAM = np.int64(16)
SMALLEST_NORMAL = np.float32(2.0**-126)
# Scales both sides of the acceptance test so that nothing underflows: the sides differ by at least 2**-174 where
# target >= 2**-126, and neither exceeds 1 before scaling.
ACCEPT_SCALE = np.float32(2.0**100)

UNIFORM_TO_FIXED = np.float32(2.0**32)
FIXED_TO_UNIFORM = np.float32(2.0**-24)
LOW_WORD = np.uint64(0xFFFFFFFF)
WORD_BITS = np.uint64(32)

SIGN = np.uint32(0x80000000)
INFINITY = np.uint32(0x7F800000)
NOWHERE = np.uint32(0xFFFFFFFF)

# Multipliers and key increments of Philox4x32 (Salmon et al. 2011, table 2 and section 3.3).
PHILOX_M0 = np.uint64(0xD2511F53)
PHILOX_M1 = np.uint64(0xCD9E8D57)
PHILOX_W0 = np.uint32(0x9E3779B9)
PHILOX_W1 = np.uint32(0xBB67AE85)
PHILOX_ROUNDS = 10


@dpex.device_func
def _uniform(seed, position, row, offset, stream):
    """Philox4x32-10 at counter (position, row, offset, stream): a uniform in [0, 1) of 24 bits."""
    key0 = np.uint32(seed & LOW_WORD)
    key1 = np.uint32(seed >> WORD_BITS)
    word0 = np.uint32(position)
    word1 = np.uint32(row)
    word2 = np.uint32(offset)
    word3 = np.uint32(stream)
    for _ in range(PHILOX_ROUNDS):
        product0 = np.uint64(word0) * PHILOX_M0
        product1 = np.uint64(word2) * PHILOX_M1
        word0 = np.uint32(np.uint32(product1 >> WORD_BITS) ^ word1 ^ key0)
        word1 = np.uint32(product1 & LOW_WORD)
        word2 = np.uint32(np.uint32(product0 >> WORD_BITS) ^ word3 ^ key1)
        word3 = np.uint32(product0 & LOW_WORD)
        key0 = np.uint32(key0 + PHILOX_W0)
        key1 = np.uint32(key1 + PHILOX_W1)
    return np.float32(np.int32(word0 >> np.uint32(8))) * FIXED_TO_UNIFORM


@dpex.device_func
def _row_uniform(options, keys, keys_batch, seed, position, sequence, offset, stream):
    """The uniform of one position, by the key and row number that the contract gives the sequence."""
    key = seed
    row = sequence
    if options & PHILOX_ROW_KEYS:
        key = keys[sequence * keys_batch]
        row = np.int64(0)
    return _uniform(key, position, row, offset, stream)


@dpex.device_func
def _integer(array, index, narrow):
    """An element of an int64 array, or of an int32 one."""
    if narrow:
        return np.int64(as_int32(array)[index])
    return array[index]


@dpex.device_func
def _token(draft_tokens, index, options):
    return _integer(draft_tokens, index, options & INT32_TOKENS)


@dpex.device_func
def _draft_limit(num_draft, num_draft_batch, max_draft, options, sequence):
    """How many positions of a sequence may have a proposal."""
    if options & NUM_DRAFT:
        given = _integer(num_draft, sequence * num_draft_batch, options & INT32_NUM_DRAFT)
        return max(np.int64(0), min(max_draft, given))
    return max_draft


@dpex.device_func
def _masked(options, given, mask, mask_batch, sequence):
    """Whether a mask of sequences holds for one; `given` is the bit of `options` that says whether there is a mask."""
    if options & given:
        return mask[sequence * mask_batch] != 0
    return False


@dpex.device_func
def _accepts(target, draft, uniform):
    """Whether u * min(draft, 1) < min(target, 1), exactly, with the corners of the contract."""
    if target != target or draft != draft:
        return False
    t = min(target, np.float32(1))
    d = min(draft, np.float32(1))
    if t < SMALLEST_NORMAL:
        return False
    if t >= d:
        return True
    # One rounding at the end keeps the sign of the exact difference; a NaN uniform compares false.
    return fma(uniform, np.float32(ACCEPT_SCALE * d), np.float32(-ACCEPT_SCALE * t)) < np.float32(0)


@dpex.device_func
def _clamp(r):
    """min(max(r, 0), 1); NaN -> 0."""
    positive = r if r > np.float32(0) else np.float32(0)
    return positive if positive < np.float32(1) else np.float32(1)


@dpex.device_func
def _add_upper(upper, r):
    """Add the upper limb of the weight floor(2**44 * r) to a sum: the new sum, and the lower limb, an int32.

    The upper limb is rounded to nearest, so the lower one has a sign: 2**24 at most. It is the error of the first fma,
    which float32 holds exactly. Where r < 2**-21 there may be a fraction to drop, but there the upper limb is zero.
    """
    new = fma(r, WEIGHT_SCALE, upper)
    return new, np.int32(fma(r, WEIGHT_SCALE, np.float32(upper - new)))


@dpex.device_func
def _upper_units(upper):
    """The sum of upper limbs as a number of multiples of 2**25."""
    return np.uint32(bits_of(upper) - UPPER_ZERO_BITS)


@dpex.device_func
def _limbs(r):
    """The weight floor(2**44 * min(max(r, 0), 1)) as two limbs, by 32-bit instructions; NaN -> 0."""
    upper, low = _add_upper(UPPER_ZERO, _clamp(r))
    return _upper_units(upper), low


@dpex.device_func
def _combine(high, low):
    return np.uint64((np.uint64(high) << LOW_BITS) + np.uint64(np.int64(low)))


@dpex.device_func
def _value(target_row, draft_row, residual, v):
    """What the weight of token v is made of: the residual or the target's probability."""
    if residual:
        return np.float32(load(target_row, v) - load(draft_row, v))
    return load(target_row, v)


@dpex.device_func
def _weight(target_row, draft_row, draft_end, excluded, v):
    """The weight of token v: of the residual below `draft_end`; `excluded` is the token that has none, or -1."""
    if v == excluded:
        return np.uint64(0)
    high, low = _limbs(_value(target_row, draft_row, v < draft_end, v))
    return _combine(high, low)


@dpex.device_func
def _token_mass(target_row, draft_row, draft_end, excluded, first, last, step):
    """The sum of the weights of every step-th token in [first, last), by one work-item."""
    mass = np.uint64(0)
    for v in range(first, last, step):
        mass += _weight(target_row, draft_row, draft_end, excluded, v)
    return mass


@dpex.device_func
def _row_mass(target_row, draft_row, residual, first, last, lane, lanes):
    """This work-item's share of the weights of tokens [first, last): every lanes-th of them, at most MAX_TILE_STEPS.

    Four at a time, each with a sum of its own, so that their steps overlap. Counters have 32 bits and addresses start
    at the work-item's own token, since 64-bit arithmetic takes several instructions on most GPUs.
    """
    target0 = at(target_row, first + lane)
    target1 = at(target0, lanes)
    target2 = at(target1, lanes)
    target3 = at(target2, lanes)
    draft0 = at(draft_row, first + lane)
    draft1 = at(draft0, lanes)
    draft2 = at(draft1, lanes)
    draft3 = at(draft2, lanes)
    upper0 = UPPER_ZERO
    upper1 = UPPER_ZERO
    upper2 = UPPER_ZERO
    upper3 = UPPER_ZERO
    low_sum = np.int32(0)
    length = np.int32(last - first)
    stride = np.int32(4 * lanes)
    last_stride = np.int32(length - stride)
    v = np.int32(0)
    while v <= last_stride:
        upper0, low0 = _add_upper(upper0, _clamp(_value(target0, draft0, residual, v)))
        upper1, low1 = _add_upper(upper1, _clamp(_value(target1, draft1, residual, v)))
        upper2, low2 = _add_upper(upper2, _clamp(_value(target2, draft2, residual, v)))
        upper3, low3 = _add_upper(upper3, _clamp(_value(target3, draft3, residual, v)))
        low_sum = np.int32(low_sum + low0 + low1 + low2 + low3)
        v = np.int32(v + stride)
    high_sum = np.uint32(
        _upper_units(upper0) + _upper_units(upper1) + _upper_units(upper2) + _upper_units(upper3)
    )  # fmt: skip
    while v + lane < length:
        high, low = _limbs(_value(target0, draft0, residual, v))
        high_sum = np.uint32(high_sum + high)
        low_sum = np.int32(low_sum + low)
        v = np.int32(v + np.int32(lanes))
    return _combine(high_sum, low_sum)


@dpex.device_func
def _mass(target_row, draft_row, draft_end, first, last, lane, lanes):
    """The same, of the residual below `draft_end` and of the target's row from there on."""
    middle = max(first, min(last, draft_end))
    mass = np.uint64(0)
    if first < middle:
        mass += _row_mass(target_row, draft_row, True, first, middle, lane, lanes)
    if middle < last:
        mass += _row_mass(target_row, draft_row, False, middle, last, lane, lanes)
    return mass


@dpex.device_func
def _sum64(value):
    """The sum of a uint64 over the work-group, by collectives of 32 bits: those of 64 are many times their size.

    Three limbs of 22 bits: each sum fits while a work-group has at most 1,024 work-items.
    """
    low = group_sum(np.uint32(value & LIMB_MASK))
    middle = group_sum(np.uint32((value >> LIMB_BITS) & LIMB_MASK))
    high = group_sum(np.uint32(value >> (LIMB_BITS + LIMB_BITS)))
    return _join(low, middle, high)


@dpex.device_func
def _scan64(value):
    """The sum of a uint64 over the work-items before this one, likewise."""
    low = group_scan(np.uint32(value & LIMB_MASK))
    middle = group_scan(np.uint32((value >> LIMB_BITS) & LIMB_MASK))
    high = group_scan(np.uint32(value >> (LIMB_BITS + LIMB_BITS)))
    return _join(low, middle, high)


@dpex.device_func
def _join(low, middle, high):
    return np.uint64(low) + (np.uint64(middle) << LIMB_BITS) + (np.uint64(high) << (LIMB_BITS + LIMB_BITS))


@dpex.device_func
def _sum_slice(
    target_row, draft_row, draft_end, excluded, vocab, tile_length, first_tile, last_tile, lane, lanes, lane_mass,
):  # fmt: skip
    """The mass of the tiles in [first_tile, last_tile); each work-item's share up to each tile goes to `lane_mass`.

    The work-items meet once, at the end, as the tiles are too short to have them do so at each.
    """
    # The first work-item takes the excluded token's weight back, so that its share may be below zero, modulo 2**64.
    excluded_tile = np.int64(-1)
    excluded_mass = np.uint64(0)
    if excluded >= 0 and excluded < vocab:
        excluded_tile = excluded // tile_length
        if lane == 0:
            excluded_mass = _weight(target_row, draft_row, 0, -1, excluded)
    mass = np.uint64(0)
    for tile in range(first_tile, last_tile):
        first = tile * tile_length
        last = min(first + tile_length, vocab)
        mass += _mass(target_row, draft_row, draft_end, first, last, lane, lanes)
        mass -= excluded_mass if tile == excluded_tile else np.uint64(0)
        lane_mass[tile * lanes + lane] = mass
    return _sum64(mass)


@dpex.device_func
def _find_tile(lane_mass, first_tile, last_tile, threshold, lane, lanes):
    """The first tile of a slice up to which its mass exceeds the threshold, by halving, with the whole work-group."""
    while last_tile - first_tile > 1:
        middle = first_tile + ((last_tile - first_tile) >> 1)
        if threshold < _sum64(lane_mass[(middle - 1) * lanes + lane]):
            last_tile = middle
        else:
            first_tile = middle
    return first_tile


@dpex.device_func
def _fixed_point(uniform):
    """U = floor(2**32 * uniform), clamped to 32 bits; NaN -> 0."""
    if uniform >= np.float32(1):
        return LOW_WORD
    if uniform > np.float32(0):
        return np.uint64(np.uint32(np.float32(uniform * UNIFORM_TO_FIXED)))
    return np.uint64(0)


@dpex.device_func
def _threshold(fixed, total):
    """floor(fixed * total / 2**32): the product has 96 bits, so the halves of the total are multiplied apart."""
    return fixed * (total >> WORD_BITS) + ((fixed * (total & LOW_WORD)) >> WORD_BITS)


@dpex.device_func
def _walk(
    draft_tokens, first_token, draft_tokens_position, draft_probs, draft_probs_position, target_probs,
    target_probs_position, uniform_accept, uniform_accept_position, keys, keys_batch, seed, offset, options,
    uses_draft, limit, draft_vocab, vocab, sequence, lane, lanes,
):  # fmt: skip
    """The first stop of a sequence: accepted * 4, plus 2 where the drafts ended without a rejection, plus uses_draft.

    Work-items look at neighbouring positions and the group takes the first stop: a serial walk with an exit would
    leave its result divergent to the compiler, and with it the loops that follow. So would a mask that was read.
    """
    first_stop = limit * 2 + 1
    for step in range(limit):
        position = step * lanes + lane
        if position >= limit:
            break
        token = _token(draft_tokens, first_token + position * draft_tokens_position, options)
        accepts = False
        if token >= 0 and token < vocab:
            target = load(target_probs, position * target_probs_position + token)
            draft = np.float32(1)
            if uses_draft:
                draft = np.float32(0)
                if token < draft_vocab:
                    draft = load(draft_probs, position * draft_probs_position + token)
            if options & PHILOX_ACCEPT:
                uniform = _row_uniform(options, keys, keys_batch, seed, position, sequence, offset, STREAM_ACCEPT)
            else:
                uniform = uniform_accept[position * uniform_accept_position]
            accepts = _accepts(target, draft, uniform)
        if not accepts:
            first_stop = min(first_stop, position * 2 + (1 if token < 0 else 0))
    return np.int64(group_min(np.uint32(first_stop * 2 + (1 if uses_draft else 0))))


@dpex.device_func
def _order_key(value):
    """A uint32 that orders float32 values as numbers, and NaN below all: no device's flush of subnormals plays in."""
    bits = bits_of(value)
    magnitude = np.uint32(bits & np.uint32(~SIGN))
    if magnitude > INFINITY:
        return np.uint32(0)
    if bits == SIGN:  # -0
        return SIGN
    return np.uint32(~bits) if bits & SIGN else np.uint32(bits | SIGN)


@dpex.device_func
def _argmax(row, vocab, lane, lanes):
    """The lowest index of the largest value of a row, by the whole work-group; -1 where all are NaN."""
    largest = np.uint32(0)
    index = NOWHERE
    for v in range(lane, vocab, lanes):
        key = _order_key(load(row, v))
        if key > largest:
            largest = key
            index = np.uint32(v)
    largest_of_all = group_max(largest)
    first = group_min(index if largest == largest_of_all else NOWHERE)
    return np.int64(-1) if first == NOWHERE else np.int64(first)


@dpex.device_func
def _walk_greedily(
    draft_tokens, first_token, draft_tokens_position, target_probs, target_probs_position, options, limit, vocab,
    lane, lanes,
):  # fmt: skip
    """The stop of a greedy sequence and the target's choice there; rows after the stop are not read."""
    position = np.int64(0)
    choice = _argmax(target_probs, vocab, lane, lanes)
    while position < limit:
        token = _token(draft_tokens, first_token + position * draft_tokens_position, options)
        if token < 0 or token != choice:
            break
        position += 1
        choice = _argmax(at(target_probs, position * target_probs_position), vocab, lane, lanes)
    return position, choice


@dpex.kernel
def verify_kernel(
    draft_tokens,         # IN   (batch, max_draft) int64, int32 with INT32_TOKENS; two strides in elements, as below
    draft_tokens_batch,
    draft_tokens_position,
    draft_probs,          # IN   (batch, max_draft, draft_vocab), last axis contiguous; read with DRAFT_PROBS only
    draft_probs_batch,
    draft_probs_position,
    target_probs,         # IN   (batch, max_draft + 1, vocab), last axis contiguous
    target_probs_batch,
    target_probs_position,
    uniform_accept,       # IN   (batch, max_draft) float32; not read with PHILOX_ACCEPT
    uniform_accept_batch,
    uniform_accept_position,
    uniform_sample,       # IN   (batch, max_draft + 1) float32; not read with PHILOX_SAMPLE
    uniform_sample_batch,
    uniform_sample_position,
    num_draft,            # IN   (batch,) int64, int32 with INT32_NUM_DRAFT; read with NUM_DRAFT only
    num_draft_batch,
    deterministic,        # IN   (batch,) uint8, 0 or 1: the draft put probability 1 on its token; DETERMINISTIC_MASK
    deterministic_batch,
    greedy,               # IN   (batch,) uint8, 0 or 1: the target's choice is its argmax; GREEDY_MASK
    greedy_batch,
    keys,                 # IN   (batch,) uint64; read with PHILOX_ROW_KEYS only
    keys_batch,
    seed,                 # IN   uint64
    offset,               # IN   uint32
    options,              # IN   bits of constants.py: which arguments there are, and of what type
    max_draft,
    draft_vocab,          # IN   at most vocab: the draft's probability is 0 beyond
    vocab,
    tile_length,          # IN   tokens of a tile, a multiple of the work-group's size and at most MAX_TILE_STEPS of it
    slice_tiles,          # IN   tiles of a work-group's slice; slices * slice_tiles >= tiles
    tiles,                # IN   tiles of a row
    scratch,              # TMP  (batch, tiles * work-group size + 8 * (slices // 8 + 1)) uint64, zero at first; below
    accepted,             # OUT  (batch,) int64
    next_token,           # OUT  (batch,) int64
):
    """Work-groups (slice, sequence): each adds up its slice of the row that matters; the last to finish draws."""
    lane = local_id(0)
    lanes = local_size(0)
    slice_index = group_id(0)
    slices = num_groups(0)
    sequence = group_id(1)
    first_token = sequence * draft_tokens_batch  # an index, as the width of a token is known where it is read
    draft_probs = at(draft_probs, sequence * draft_probs_batch)
    target_probs = at(target_probs, sequence * target_probs_batch)
    # One array for all three, as it takes a runtime several times as long to pass a pointer as a number.
    lane_mass = at(scratch, sequence * (tiles * lanes + 8 * ((slices >> 3) + 1)))  # (tiles, work-items): shares so far
    slice_mass = at(lane_mass, tiles * lanes)  # (slices,)
    arrivals = at(slice_mass, slices)  # one uint32: the slices that are done; zero again when all are
    limit = _draft_limit(num_draft, num_draft_batch, max_draft, options, sequence)

    if _masked(options, GREEDY_MASK, greedy, greedy_batch, sequence):
        if slice_index == 0:
            position, choice = _walk_greedily(
                draft_tokens, first_token, draft_tokens_position, target_probs, target_probs_position, options,
                limit, vocab, lane, lanes,
            )  # fmt: skip
            if lane == 0:
                accepted[sequence] = position
                next_token[sequence] = choice
        return

    uses_draft = (options & DRAFT_PROBS) != 0
    if _masked(options, DETERMINISTIC_MASK, deterministic, deterministic_batch, sequence):
        uses_draft = False
    stop = _walk(
        draft_tokens, first_token, draft_tokens_position, draft_probs, draft_probs_position, target_probs,
        target_probs_position, at(uniform_accept, sequence * uniform_accept_batch), uniform_accept_position, keys,
        keys_batch, seed, offset, options, uses_draft, limit, draft_vocab, vocab, sequence, lane, lanes,
    )  # fmt: skip
    position = stop >> 2
    rejected = (stop & 2) == 0
    uses_draft = (stop & 1) != 0
    draft_end = draft_vocab if rejected and uses_draft else np.int64(0)
    excluded = np.int64(-1)
    if rejected and not uses_draft:
        excluded = _token(draft_tokens, first_token + position * draft_tokens_position, options)
    target_row = at(target_probs, position * target_probs_position)
    draft_row = at(draft_probs, position * draft_probs_position)

    first_tile = min(slice_index * slice_tiles, tiles)
    last_tile = min(first_tile + slice_tiles, tiles)
    total = _sum_slice(
        target_row, draft_row, draft_end, excluded, vocab, tile_length, first_tile, last_tile, lane, lanes, lane_mass,
    )  # fmt: skip

    # The last work-group to arrive draws. Each work-item takes neighbouring slices: one scan of their sums finds the
    # slices of which work-item the threshold falls into.
    share = np.int64(np.uint32(slices + lanes - 1) // np.uint32(lanes))
    mass = np.uint64(0)
    group_barrier()
    if slices > 1:
        arrived = np.uint32(0)
        if lane == 0:
            slice_mass[slice_index] = total
            arrived = atomic_increment(arrivals)
        if group_sum(arrived) != np.uint32(slices - 1):
            return
        if lane == 0:
            arrivals[0] = np.uint64(0)
        group_barrier()
        for index in range(lane * share, min(lane * share + share, slices)):
            mass += slice_mass[index]
        total = _sum64(mass)

    # A total of 2**64, all of MAX_VOCAB weights at their largest, has wrapped to zero: any weight tells it from zero.
    wrapped = vocab == MAX_VOCAB and total == 0 and _weight(target_row, draft_row, draft_end, excluded, 0) != 0
    one_slice = slices == 1
    if total == 0 and rejected and not wrapped:
        draft_end = np.int64(0)
        excluded = np.int64(-1)
        total = _sum_slice(
            target_row, draft_row, 0, -1, vocab, tile_length, 0, tiles, lane, lanes, lane_mass,
        )  # fmt: skip
        group_barrier()
        one_slice = True
        wrapped = vocab == MAX_VOCAB and total == 0 and _weight(target_row, draft_row, draft_end, excluded, 0) != 0

    if options & PHILOX_SAMPLE:
        uniform = _row_uniform(options, keys, keys_batch, seed, position, sequence, offset, STREAM_SAMPLE)
    else:
        uniform = uniform_sample[sequence * uniform_sample_batch + position * uniform_sample_position]
    fixed = _fixed_point(uniform)

    if lane == 0:
        accepted[sequence] = position
    if total == 0:
        if lane == 0:
            # U * 2**64 / 2**32 lies among equal weights of 2**44: the token is U / 2**12.
            next_token[sequence] = np.int64(fixed >> np.uint64(12)) if wrapped else np.int64(-1)
        return
    threshold = _threshold(fixed, total)

    # The slice that the threshold falls into, and the mass before it.
    first_tile = np.int64(0)
    last_tile = tiles
    before = np.uint64(0)
    if not one_slice:
        lower = _scan64(mass)
        found = np.int64(0)
        if lower <= threshold and threshold < lower + mass:
            found = lane * share
            before = lower
            for _ in range(share):
                if threshold < before + slice_mass[found]:
                    break
                before += slice_mass[found]
                found += 1
        first_tile = np.int64(group_sum(np.uint32(found))) * slice_tiles
        last_tile = min(first_tile + slice_tiles, tiles)
        before = _sum64(before)
    slice_first = first_tile

    first_tile = _find_tile(lane_mass, first_tile, last_tile, np.uint64(threshold - before), lane, lanes)
    if first_tile > slice_first:
        before += _sum64(lane_mass[(first_tile - 1) * lanes + lane])

    # Each team of work-items takes neighbouring tokens of the tile: all but small work-groups have teams of a vector.
    team = TEAM if np.uint32(lanes) % np.uint32(TEAM) == 0 else np.int64(1)
    own_team = np.int64(np.uint32(lane) // np.uint32(team))
    share = np.int64(np.uint32(tile_length) // np.uint32(lanes)) * team
    tile = first_tile * tile_length
    first = tile + own_team * share
    last = min(first + share, vocab)
    mass = _token_mass(target_row, draft_row, draft_end, excluded, first + lane - own_team * team, last, team)
    before += _scan64(mass)
    holds = before <= threshold and threshold < before + mass
    found = np.int64(group_sum(np.uint32(own_team if holds else 0)))
    before = _sum64(before if lane == found * team else np.uint64(0))

    # All work-items divide the tokens of the team that holds the threshold, and one of them walks through its own.
    last = min(tile + found * share + share, vocab)
    own = np.int64(np.uint32(share + lanes - 1) // np.uint32(lanes))
    first = tile + found * share + lane * own
    last = min(first + own, last)
    mass = _token_mass(target_row, draft_row, draft_end, excluded, first, last, 1)
    before += _scan64(mass)
    if before <= threshold and threshold < before + mass:
        for v in range(first, last):
            before += _weight(target_row, draft_row, draft_end, excluded, v)
            if threshold < before:
                next_token[sequence] = v
                break


@dpex.kernel
def uniforms_kernel(
    options,              # IN   PHILOX_ROW_KEYS or 0
    keys,                 # IN   (batch,) uint64; read with PHILOX_ROW_KEYS only
    keys_batch,
    seed,                 # IN   uint64
    offset,               # IN   uint32
    max_draft,
    uniform_accept,       # OUT  (batch, num_draft) float32, contiguous
    uniform_sample,       # OUT  (batch, num_draft + 1) float32, contiguous
):
    """Work-group (sequence): the uniforms that verification draws for itself, written out."""
    lane = local_id(0)
    lanes = local_size(0)
    sequence = group_id(0)
    for step in range(max_draft + 1):
        position = step * lanes + lane
        if position > max_draft:
            break
        uniform_sample[sequence * (max_draft + 1) + position] = _row_uniform(
            options, keys, keys_batch, seed, position, sequence, offset, STREAM_SAMPLE
        )
        if position < max_draft:
            uniform_accept[sequence * max_draft + position] = _row_uniform(
                options, keys, keys_batch, seed, position, sequence, offset, STREAM_ACCEPT
            )


@dpex.kernel
def emitted_kernel(
    draft_tokens,         # IN   (batch, max_draft) int64, int32 with INT32_TOKENS; two strides in elements
    draft_tokens_batch,
    draft_tokens_position,
    accepted,             # IN   (batch,) int64
    accepted_batch,
    next_token,           # IN   (batch,) int64
    next_token_batch,
    options,              # IN   INT32_TOKENS or 0
    max_draft,
    emitted,              # OUT  (batch, max_draft + 1) int64, contiguous
):
    """Work-group (sequence): the accepted prefix, the token that follows it, then -1."""
    lane = local_id(0)
    lanes = local_size(0)
    sequence = group_id(0)
    prefix = min(max(accepted[sequence * accepted_batch], 0), max_draft)
    for step in range(max_draft + 1):
        position = step * lanes + lane
        if position > max_draft:
            break
        token = np.int64(-1)
        if position < prefix:
            token = _token(draft_tokens, sequence * draft_tokens_batch + position * draft_tokens_position, options)
        elif position == prefix:
            token = next_token[sequence * next_token_batch]
        emitted[sequence * (max_draft + 1) + position] = token


@dpex.kernel
def stats_kernel(
    draft_tokens,         # IN   (batch, max_draft) int64, int32 with INT32_TOKENS; two strides in elements
    draft_tokens_batch,
    draft_tokens_position,
    num_draft,            # IN   (batch,) int64, int32 with INT32_NUM_DRAFT; read with NUM_DRAFT only
    num_draft_batch,
    options,              # IN   bits of constants.py
    batch,
    max_draft,
    accepted,             # IN   (batch,) int64, contiguous
    next_token,           # IN   (batch,) int64, contiguous
    before,               # IN   counters of `before_positions` to start from; not read with -1
    before_positions,
    counters,             # I/O  (2 + 2 * positions,) int64: sequences, tokens, proposed and accepted at each position
    positions,            # IN   at least max_draft, and max_draft where `counters` is not `before`
    fresh,                # IN   1: `counters` is not `before`, and not initialised
):
    """One work-group, each work-item with a sequence at a time: add to the counters, without 64-bit atomics."""
    lane = local_id(0)
    lanes = local_size(0)
    if fresh:
        for step in range(positions):
            position = step * lanes + lane
            if position >= positions:
                break
            proposed_before = np.int64(0)
            accepted_before = np.int64(0)
            if position < before_positions:
                proposed_before = before[2 + position]
                accepted_before = before[2 + before_positions + position]
            counters[2 + position] = proposed_before
            counters[2 + positions + position] = accepted_before
        if lane == 0:
            sequences_before = np.int64(0)
            emitted_before = np.int64(0)
            if before_positions >= 0:
                sequences_before = before[0]
                emitted_before = before[1]
            counters[0] = sequences_before
            counters[1] = emitted_before
        group_barrier()

    emitted = np.uint64(0)
    for first in range(0, batch, lanes):
        sequence = first + lane
        proposals = np.int64(0)
        prefix = np.int64(0)
        if sequence < batch:
            for position in range(_draft_limit(num_draft, num_draft_batch, max_draft, options, sequence)):
                if _token(draft_tokens, sequence * draft_tokens_batch + position * draft_tokens_position, options) < 0:
                    break
                proposals += 1
            prefix = min(max(accepted[sequence], 0), max_draft)
            emitted += np.uint64(prefix + (1 if next_token[sequence] >= 0 else 0))
        for position in range(max_draft):
            # Both counts in one sum: a work-group has at most 1,024 work-items.
            here = np.uint32((1 if position < proposals else 0) + (0x10000 if position < prefix else 0))
            both = np.int64(group_sum(here))
            if lane == 0:
                counters[2 + position] += both & 0xFFFF
                counters[2 + positions + position] += both >> 16
    emitted = _sum64(emitted)
    if lane == 0:
        counters[0] += batch
        counters[1] += np.int64(emitted)


# A sum of weights that is one.
ONE = np.uint64(2**44)
WEIGHT_UNIT = np.float32(2.0**-44)
# Elements of a chunk for each work-item: its 32-bit counters of limbs hold 127.
CHECKED_STEPS = 64


@dpex.device_func
def _count_proposals(draft_tokens, first_token, draft_tokens_position, options, limit, lane, lanes):
    """How many positions of a sequence hold proposals, by the whole work-group: those before a negative token."""
    end = np.int64(limit)
    for step in range(limit):
        position = step * lanes + lane
        if position >= limit:
            break
        if _token(draft_tokens, first_token + position * draft_tokens_position, options) < 0:
            end = min(end, position)
            break
    return np.int64(group_min(np.uint32(end)))


@dpex.device_func
def _is_uniform(value):
    return value >= np.float32(0) and value < np.float32(1)


@dpex.kernel
def check_proposals_kernel(
    draft_tokens,         # IN   (batch, max_draft) int64, int32 with INT32_TOKENS; two strides in elements
    draft_tokens_batch,
    draft_tokens_position,
    num_draft,            # IN   (batch,) int64, int32 with INT32_NUM_DRAFT; read with NUM_DRAFT only
    num_draft_batch,
    greedy,               # IN   (batch,) uint8, 0 or 1
    greedy_batch,
    uniform_accept,       # IN   (batch, max_draft) float32
    uniform_accept_batch,
    uniform_accept_position,
    uniform_sample,       # IN   (batch, max_draft + 1) float32
    uniform_sample_batch,
    uniform_sample_position,
    options,              # IN   bits of constants.py
    batch,
    max_draft,
    vocab,
    report,               # OUT  (6, batch) int64: the first bad token's position, or -1, and that token; 0 where the
                          #      length is bad, or -1, and the length; positions of bad uniforms of both kinds, or -1
    values,               # OUT  (2, batch) float32: the bad uniforms
):
    """Work-group (sequence): find its first bad token, length and uniforms."""
    lane = local_id(0)
    lanes = local_size(0)
    sequence = group_id(0)
    first_token = sequence * draft_tokens_batch
    uniform_accept = at(uniform_accept, sequence * uniform_accept_batch)
    uniform_sample = at(uniform_sample, sequence * uniform_sample_batch)
    limit = _draft_limit(num_draft, num_draft_batch, max_draft, options, sequence)
    proposals = _count_proposals(draft_tokens, first_token, draft_tokens_position, options, limit, lane, lanes)
    is_greedy = _masked(options, GREEDY_MASK, greedy, greedy_batch, sequence)

    has_accept = not is_greedy and (options & PHILOX_ACCEPT) == 0
    has_sample = not is_greedy and (options & PHILOX_SAMPLE) == 0

    none = max_draft + 1
    bad_token = none
    bad_accept = none
    bad_sample = none
    for step in range(proposals + 1):
        position = step * lanes + lane
        if position > proposals:
            break
        if position < proposals:
            if _token(draft_tokens, first_token + position * draft_tokens_position, options) >= vocab:
                bad_token = min(bad_token, position)
            if has_accept and not _is_uniform(uniform_accept[position * uniform_accept_position]):
                bad_accept = min(bad_accept, position)
        if has_sample and not _is_uniform(uniform_sample[position * uniform_sample_position]):
            bad_sample = min(bad_sample, position)
    bad_token = np.int64(group_min(np.uint32(bad_token)))
    bad_accept = np.int64(group_min(np.uint32(bad_accept)))
    bad_sample = np.int64(group_min(np.uint32(bad_sample)))

    if lane == 0:
        report[sequence] = np.int64(-1)
        if bad_token < none:
            report[sequence] = bad_token
            report[batch + sequence] = _token(draft_tokens, first_token + bad_token * draft_tokens_position, options)
        report[2 * batch + sequence] = np.int64(-1)
        if options & NUM_DRAFT:
            length = _integer(num_draft, sequence * num_draft_batch, options & INT32_NUM_DRAFT)
            if length < 0 or length > max_draft:
                report[2 * batch + sequence] = np.int64(0)
                report[3 * batch + sequence] = length
        report[4 * batch + sequence] = np.int64(-1)
        if bad_accept < none:
            report[4 * batch + sequence] = bad_accept
            values[sequence] = uniform_accept[bad_accept * uniform_accept_position]
        report[5 * batch + sequence] = np.int64(-1)
        if bad_sample < none:
            report[5 * batch + sequence] = bad_sample
            values[batch + sequence] = uniform_sample[bad_sample * uniform_sample_position]


@dpex.device_func
def _is_bad(value, largest, is_greedy):
    if is_greedy:
        return value != value
    return not (value >= np.float32(0) and value <= largest)


@dpex.device_func
def _check_chunk(chunk, length, largest, is_greedy, lane, lanes):
    """This work-item's share of a chunk: the first bad value, or `length`, and the sum of weights.

    All work-items take the same steps but the last, and the counters have 32 bits, so that a CPU's compiler makes
    vectors of them.
    """
    stride = np.int32(lanes)
    whole = np.int32(length - np.int32(np.uint32(length) % np.uint32(stride)))
    own = at(chunk, lane)
    bad = length
    high_sum = np.uint32(0)
    low_sum = np.int32(0)
    v = np.int32(0)
    while v < whole:
        value = load(own, v)
        high, low = _limbs(value)
        high_sum = np.uint32(high_sum + high)
        low_sum = np.int32(low_sum + low)
        bad = min(bad, np.int32(v + np.int32(lane)) if _is_bad(value, largest, is_greedy) else length)
        v = np.int32(v + stride)
    if whole + lane < length:
        value = load(own, whole)
        high, low = _limbs(value)
        high_sum = np.uint32(high_sum + high)
        low_sum = np.int32(low_sum + low)
        bad = min(bad, np.int32(whole + np.int32(lane)) if _is_bad(value, largest, is_greedy) else length)
    return bad, _combine(high_sum, low_sum)


@dpex.kernel
def check_rows_kernel(
    rows,                 # IN   (batch, max_draft + bonus, columns), last axis contiguous, strides in elements
    rows_batch,
    rows_position,
    columns,
    bonus,                # IN   1: the target's rows, with one behind the proposals; 0: the draft's
    tolerance,            # IN   of a sum, in units of 2**-44
    draft_tokens,         # IN   (batch, max_draft) int64, int32 with INT32_TOKENS; two strides in elements
    draft_tokens_batch,
    draft_tokens_position,
    num_draft,            # IN   (batch,) int64, int32 with INT32_NUM_DRAFT; read with NUM_DRAFT only
    num_draft_batch,
    greedy,               # IN   (batch,) uint8, 0 or 1: sequences of which the target must not be NaN, and nothing else
    greedy_batch,
    deterministic,        # IN   (batch,) uint8, 0 or 1: sequences of which the draft is not read
    deterministic_batch,
    options,              # IN   bits of constants.py
    max_draft,
    report,               # OUT  (batch, max_draft + bonus, 2) int64: the first bad value's token, -1 for a bad sum, -2
                          #      for none; the row's sum in units of 2**-44, modulo 2**64
    values,               # OUT  (batch, max_draft + bonus) float32: that value; the first of the row for a bad sum
):
    """Work-groups (position, sequence): find the first bad value of a row, and add the row up."""
    lane = local_id(0)
    lanes = local_size(0)
    position = group_id(0)
    positions = num_groups(0)
    sequence = group_id(1)
    entry = sequence * positions + position
    limit = _draft_limit(num_draft, num_draft_batch, max_draft, options, sequence)
    proposals = _count_proposals(
        draft_tokens, sequence * draft_tokens_batch, draft_tokens_position, options, limit, lane, lanes,
    )  # fmt: skip
    is_greedy = _masked(options, GREEDY_MASK, greedy, greedy_batch, sequence)
    is_deterministic = _masked(options, DETERMINISTIC_MASK, deterministic, deterministic_batch, sequence)
    skipped = bonus == 0 and (is_greedy or is_deterministic)
    if skipped or position >= proposals + bonus:
        if lane == 0:
            report[2 * entry] = np.int64(-2)
        return

    row = at(rows, sequence * rows_batch + position * rows_position)
    largest = np.float32(np.float32(1) + np.float32(np.float32(tolerance) * WEIGHT_UNIT))
    bad = np.int32(columns)
    total = np.uint64(0)
    for first in range(0, columns, CHECKED_STEPS * lanes):
        length = np.int32(min(columns - first, CHECKED_STEPS * lanes))
        chunk_bad, chunk_total = _check_chunk(at(row, first), length, largest, is_greedy, lane, lanes)
        if chunk_bad < length:
            bad = min(bad, np.int32(np.int32(first) + chunk_bad))
        total += chunk_total
    bad = np.int64(group_min(np.uint32(bad)))
    total = _sum64(total)
    if lane == 0:
        margin = np.uint64(tolerance)
        found = np.int64(-2)
        if bad < columns:
            found = bad
            values[entry] = load(row, bad)
        elif not is_greedy and (total < np.uint64(ONE - margin) or total > np.uint64(ONE + margin)):
            found = np.int64(-1)
            values[entry] = load(row, 0)
        report[2 * entry] = found
        report[2 * entry + 1] = np.int64(total)
