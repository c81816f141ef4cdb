"""Philox4x32-10: uniforms that depend on a seed and a counter and on nothing else.

A counter-based generator keeps no state, so a device, a CPU and a plain Python loop draw the same uniforms in
any order: Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC'11. Here the key
is the 64-bit seed and the counter says which uniform is meant: (position, row, offset, stream).

This module does not import numpy until an array is asked for: verification on a device needs none.
"""

from __future__ import annotations

import operator
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from specverify_dpex.constants import STREAM_ACCEPT, STREAM_SAMPLE

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

# The constants of the paper, section 4.3: the multipliers were searched for their avalanche, the Weyl
# increments are the golden ratio and sqrt(3) - 1 in units of 2**-32.
ROUNDS = 10
MULTIPLIER_0 = 0xD2511F53
MULTIPLIER_1 = 0xCD9E8D57
WEYL_0 = 0x9E3779B9
WEYL_1 = 0xBB67AE85
MASK_32 = 0xFFFFFFFF


def philox4x32(counter: tuple[int, int, int, int], key: tuple[int, int]) -> tuple[int, int, int, int]:
    """Encrypt one counter with Philox4x32-10, in plain Python.

    Parameters
    ----------
    counter : tuple of 4 ints in [0, 2**32)
    key : tuple of 2 ints in [0, 2**32)

    Returns
    -------
    tuple of 4 ints in [0, 2**32)

    Examples
    --------
    The first known-answer vector of the Random123 distribution:

    >>> [f"{word:08x}" for word in philox4x32((0, 0, 0, 0), (0, 0))]
    ['6627e8d5', 'e169c58d', 'bc57ac4c', '9b00dbd8']
    """
    return _rounds(*counter, *key)


def philox4x32_array(
    counter: Sequence[npt.ArrayLike], key: Sequence[npt.ArrayLike]
) -> tuple[npt.NDArray[np.uint32], ...]:
    """Encrypt many counters at once, with numpy: `philox4x32` of every element.

    Parameters
    ----------
    counter : sequence of 4 integer arrays that broadcast together, values in [0, 2**32)
    key : sequence of 2 integer arrays that broadcast with them, values in [0, 2**32)

    Returns
    -------
    tuple of 4 uint32 arrays of the broadcast shape
    """
    import numpy as np  # here, so that importing this module costs no numpy

    words = [np.asarray(word, dtype=np.uint64) for word in (*counter, *key)]
    shape = np.broadcast_shapes(*(word.shape for word in words))
    # At least one axis: numpy 1.x makes a float64 of a uint64 scalar and a Python int.
    outputs = _rounds(*(np.atleast_1d(word) for word in words))
    return tuple(output.astype(np.uint32).reshape(shape) for output in outputs)


def _rounds(counter_0: Any, counter_1: Any, counter_2: Any, counter_3: Any, key_0: Any, key_1: Any) -> Any:
    """All ten rounds, on Python ints or on uint64 arrays alike: nothing here exceeds 64 bits."""
    for _ in range(ROUNDS):
        product_0 = counter_0 * MULTIPLIER_0
        product_1 = counter_2 * MULTIPLIER_1
        counter_0, counter_1, counter_2, counter_3 = (
            (product_1 >> 32) ^ counter_1 ^ key_0,
            product_1 & MASK_32,
            (product_0 >> 32) ^ counter_3 ^ key_1,
            product_0 & MASK_32,
        )
        key_0 = (key_0 + WEYL_0) & MASK_32
        key_1 = (key_1 + WEYL_1) & MASK_32
    return counter_0, counter_1, counter_2, counter_3


def uniform_scalar(key: int, position: int, row: int, offset: int, stream: int) -> float:
    """Draw one uniform: the top 24 bits of the first output word, times 2**-24.

    24 bits are what float32 holds, so the value is exact in float32, lies in [0, 1) and never rounds up to 1.

    Parameters
    ----------
    key : int in [0, 2**64), the seed of the row
    position : int, the position in the draft
    row : int, the index in the batch; 0 where each row has a key of its own
    offset : int in [0, 2**32), the caller's step counter
    stream : STREAM_ACCEPT or STREAM_SAMPLE

    Returns
    -------
    float in [0, 1), a multiple of 2**-24
    """
    word = philox4x32((position, row, offset, stream), (key & MASK_32, key >> 32))[0]
    return (word >> 8) * 2.0**-24


def uniforms(seed: Any, offset: int, batch: int, num_draft: int, *, like: Any = None) -> tuple[Any, Any]:
    """Draw the uniforms that `verify` draws when it is given `seed` and `offset` instead of arrays.

    Equal arguments give equal uniforms, on every machine. With one seed per row, a row's uniforms depend on
    its own seed alone and not on where it stands in the batch. Philox4x32-10 of Salmon et al. (2011).

    Parameters
    ----------
    seed : int in [0, 2**64), or (batch,) of them, or None
        A scalar is every row's key and the rows differ in their index; an array holds each row's own key.
        None takes 64 bits from the operating system.
    offset : int in [0, 2**32)
        The caller's step counter: a new value for each call gives new uniforms under the same seed.
    batch : int
    num_draft : int
    like : array, optional
        Draw them on this array's device and queue, as arrays of its kind; numpy arrays made on the host if
        None. An array of seeds must then be a uint64 array of the same kind.

    Returns
    -------
    uniform_accept : (batch, num_draft) float32 in [0, 1)
    uniform_sample : (batch, num_draft + 1) float32 in [0, 1)

    Raises
    ------
    TypeError
        If an argument is not an integer.
    ValueError
        If an argument is out of its range or `seed` is not of shape (batch,).

    Examples
    --------
    >>> from specverify_dpex.philox import STREAM_ACCEPT, uniform_scalar, uniforms
    >>> uniform_accept, uniform_sample = uniforms(seed=7, offset=0, batch=2, num_draft=3)
    >>> uniform_accept.shape, uniform_sample.shape
    ((2, 3), (2, 4))
    >>> one = uniform_scalar(key=7, position=2, row=1, offset=0, stream=STREAM_ACCEPT)
    >>> float(uniform_accept[1, 2]) == one
    True
    """
    offset = check_offset(offset)
    batch = _check_integer("batch", batch, 32, remedy=_COUNT)
    num_draft = _check_integer("num_draft", num_draft, 31, remedy=_COUNT)
    if like is not None:
        from specverify_dpex.verify import device_uniforms  # here, since that module needs this one

        return device_uniforms(seed, offset, batch, num_draft, like)
    keys, rows = row_keys(seed, batch)
    return (
        _uniform_array(keys, rows, offset, STREAM_ACCEPT, num_draft),
        _uniform_array(keys, rows, offset, STREAM_SAMPLE, num_draft + 1),
    )


def _uniform_array(
    keys: list[int], rows: list[int], offset: int, stream: int, positions: int
) -> npt.NDArray[np.float32]:
    """`uniform_scalar` of every row and position, as a (batch, positions) float32 array."""
    import numpy as np  # here, so that importing this module costs no numpy

    key = np.array(keys, dtype=np.uint64)[:, None]
    row = np.array(rows, dtype=np.uint64)[:, None]
    position = np.arange(positions, dtype=np.uint64)[None, :]
    words = philox4x32_array((position, row, offset, stream), (key & np.uint64(MASK_32), key >> np.uint64(32)))
    return (words[0] >> np.uint32(8)).astype(np.float32) * np.float32(2.0**-24)


def row_keys(seed: Any, batch: int) -> tuple[list[int], list[int]]:
    """Check `seed` and say which key and which row word each sequence of the batch has.

    Parameters
    ----------
    seed : int in [0, 2**64), or (batch,) of them, or None
        None takes 64 bits from the operating system.
    batch : int

    Returns
    -------
    keys : list of batch ints
    rows : list of batch ints
        0, 1, … under one key for all; 0 for every row that has its own key, so that a sequence keeps its
        draws wherever it stands in a batch.

    Raises
    ------
    TypeError
        If a seed is not an integer.
    ValueError
        If a seed is out of range or an array of seeds is not of shape (batch,).
    """
    if seed is None:
        seed = entropy_seed()
    # The shape decides, not __index__: some libraries let an array of one element pass for an integer.
    shape = (len(seed),) if isinstance(seed, Sequence) else tuple(getattr(seed, "shape", ()))
    if isinstance(seed, str) or not shape:
        return [check_seed(seed)] * batch, list(range(batch))
    if shape != (batch,):
        raise ValueError(
            f"`seed` must be one integer or have shape (batch,): expected ({batch},), got {shape}. "
            "Pass one seed for each row, or one for all."
        )
    values = seed.tolist() if hasattr(seed, "tolist") else seed
    return [_check_integer(f"seed[{row}]", value, 64) for row, value in enumerate(values)], [0] * batch


def check_seed(seed: Any) -> int:
    """Return a scalar `seed` as a Python int in [0, 2**64), or raise.

    Raises
    ------
    TypeError
        If it is not an integer; a bool is not one here.
    ValueError
        If it is out of range.
    """
    return _check_integer("seed", seed, 64, accepted="an int, or a (batch,) uint64 array for a seed of each sequence")


def check_offset(offset: Any) -> int:
    """Return `offset` as a Python int in [0, 2**32), or raise.

    Raises
    ------
    TypeError
        If it is not an integer; a bool is not one here.
    ValueError
        If it is out of range.
    """
    return _check_integer("offset", offset, 32)


_REDUCE = "Reduce it modulo 2**{bits}."  # any such number stands for the one that the caller has
_COUNT = "Pass how many there are, and draw parts where there are 2**{bits} or more."


def _check_integer(
    name: str,
    value: Any,
    bits: int,
    accepted: str = "an int, or anything with __index__",
    remedy: str = _REDUCE,
) -> int:
    """Return `value` as a Python int in [0, 2**bits), or raise the error that names it."""
    try:
        # A bool has __index__ too, and so has numpy's before 2.0, but passed as a count or a seed it is a
        # misplaced flag.
        integer = None if type(value).__name__ in ("bool", "bool_") else operator.index(value)
    except TypeError:
        integer = None
    if integer is None:
        raise TypeError(f"`{name}` must be an integer: expected int, got {type(value).__name__}. Pass {accepted}.")
    if not 0 <= integer < 1 << bits:
        raise ValueError(
            f"`{name}` must fit in {bits} bits: expected an integer in [0, 2**{bits}), got {integer}. "
            + remedy.format(bits=bits)
        )
    return integer


def entropy_seed() -> int:
    """Take a 64-bit seed from the operating system's entropy."""
    return int.from_bytes(os.urandom(8), "little")
