"""Philox4x32-10 against its published vectors, and the uniforms made of it."""

from __future__ import annotations

import doctest
import subprocess
import sys

import numpy as np
import pytest

from specverify_dpex import philox
from specverify_dpex.philox import STREAM_ACCEPT, STREAM_SAMPLE, uniform_scalar, uniforms

# The lines "philox4x32 10" of kat_vectors in the Random123 distribution: counter, key, output.
KNOWN_ANSWERS = {
    "zeros": ("00000000 " * 4, "00000000 " * 2, "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    "ones": ("ffffffff " * 4, "ffffffff " * 2, "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    "pi": ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
}
SEED = 0x0123456789ABCDEF
# Chi-square with 63 degrees of freedom is below the first, and above the second, with a chance of 0.01 %.
CHI_SQUARE_63 = (29, 114)


def words(text: str) -> tuple[int, ...]:
    return tuple(int(word, 16) for word in text.split())


@pytest.mark.parametrize("counter, key, output", KNOWN_ANSWERS.values(), ids=KNOWN_ANSWERS.keys())
def test_philox4x32_equals_the_known_answers(counter, key, output):
    assert philox.philox4x32(words(counter), words(key)) == words(output)


def test_philox4x32_array_equals_the_known_answers():
    counters, keys, outputs = (
        np.array([words(vector[part]) for vector in KNOWN_ANSWERS.values()], dtype=np.uint32) for part in range(3)
    )
    result = philox.philox4x32_array(counters.T, keys.T)
    assert [word.dtype for word in result] == [np.uint32] * 4
    assert np.array_equal(np.stack(result, axis=1), outputs)


def test_philox4x32_array_equals_scalar_for_random_words():
    rng = np.random.default_rng(1)
    inputs = rng.integers(0, 2**32, (6, 500), dtype=np.uint64)
    result = np.stack(philox.philox4x32_array(inputs[:4], inputs[4:]), axis=1)
    expected = [philox.philox4x32(tuple(row[:4]), tuple(row[4:])) for row in inputs.T.tolist()]
    assert result.tolist() == [list(row) for row in expected]


def test_philox4x32_array_broadcasts():
    rows, positions = np.arange(3)[:, None], np.arange(5)[None, :]
    result = philox.philox4x32_array((positions, rows, 9, 1), (11, 12))
    expected = [[philox.philox4x32((position, row, 9, 1), (11, 12)) for position in range(5)] for row in range(3)]
    assert np.array_equal(np.stack(result, axis=2), expected)


def test_philox4x32_array_takes_plain_integers():
    result = philox.philox4x32_array((2**32 - 1, 1, 2, 3), (2**32 - 1, 5))
    assert [word.shape for word in result] == [()] * 4
    assert tuple(int(word) for word in result) == philox.philox4x32((2**32 - 1, 1, 2, 3), (2**32 - 1, 5))


def test_uniform_scalar_is_the_top_24_bits_of_the_first_word():
    # Counter and key all zeros: the first known answer, 6627e8d5.
    assert uniform_scalar(key=0, position=0, row=0, offset=0, stream=STREAM_ACCEPT) == 0x6627E8 * 2.0**-24


def test_uniform_scalar_orders_the_words_as_specified():
    position, row, offset, stream = words(KNOWN_ANSWERS["pi"][0])
    low, high = words(KNOWN_ANSWERS["pi"][1])
    # The third known answer, d16cfe09.
    assert uniform_scalar((high << 32) | low, position, row, offset, stream) == 0xD16CFE * 2.0**-24


def test_stream_numbers_are_as_specified():
    assert (STREAM_ACCEPT, STREAM_SAMPLE) == (0, 1)


@pytest.mark.parametrize("seed", [0, 7, SEED, 2**32 - 1, 2**32, 2**63, 2**64 - 1])
@pytest.mark.parametrize("offset", [0, 1, 2**31, 2**32 - 1])
def test_uniforms_equal_uniform_scalar(seed, offset):
    accept, sample = uniforms(seed, offset, batch=3, num_draft=4)
    assert (accept.dtype, accept.shape) == (np.float32, (3, 4))
    assert (sample.dtype, sample.shape) == (np.float32, (3, 5))
    for row in range(3):
        expected = [uniform_scalar(seed, position, row, offset, STREAM_ACCEPT) for position in range(4)]
        assert accept[row].tolist() == expected
        expected = [uniform_scalar(seed, position, row, offset, STREAM_SAMPLE) for position in range(5)]
        assert sample[row].tolist() == expected


@pytest.mark.parametrize("batch, num_draft", [(0, 3), (1, 0), (0, 0)])
def test_uniforms_shape_of_empty_batches_and_drafts(batch, num_draft):
    accept, sample = uniforms(SEED, 0, batch, num_draft)
    assert (accept.shape, sample.shape) == ((batch, num_draft), (batch, num_draft + 1))


def test_uniforms_with_a_seed_for_each_row_use_row_word_zero():
    seeds = [SEED, 0, 2**64 - 1]
    accept, sample = uniforms(seeds, 5, batch=3, num_draft=2)
    for row, seed in enumerate(seeds):
        assert accept[row].tolist() == [uniform_scalar(seed, k, 0, 5, STREAM_ACCEPT) for k in range(2)]
        assert sample[row].tolist() == [uniform_scalar(seed, k, 0, 5, STREAM_SAMPLE) for k in range(3)]


@pytest.mark.parametrize(
    "make",
    [list, tuple, lambda seeds: np.array(seeds, np.uint64), lambda seeds: np.array(seeds, np.int64)],
    ids=["list", "tuple", "uint64", "int64"],
)
def test_uniforms_accept_arrays_of_seeds(make):
    seeds = [3, 2**62 + 1, 3]
    accept, sample = uniforms(make(seeds), 0, batch=3, num_draft=2)
    expected_accept, expected_sample = uniforms(seeds, 0, batch=3, num_draft=2)
    assert np.array_equal(accept, expected_accept) and np.array_equal(sample, expected_sample)
    # Equal keys, equal uniforms; other keys, other uniforms.
    assert np.array_equal(accept[0], accept[2])
    assert not np.array_equal(accept[0], accept[1])


def test_uniforms_do_not_depend_on_the_place_in_the_batch_with_a_seed_for_each_row():
    seeds = [11, 22, 33, 44]
    order = [2, 0, 3]
    accept, sample = uniforms(seeds, 1, batch=4, num_draft=3)
    moved_accept, moved_sample = uniforms([seeds[row] for row in order], 1, batch=3, num_draft=3)
    assert np.array_equal(moved_accept, accept[order]) and np.array_equal(moved_sample, sample[order])


def test_uniforms_are_prefixes_of_those_of_larger_batches_and_longer_drafts():
    accept, sample = uniforms(SEED, 1, batch=2, num_draft=3)
    longer_accept, longer_sample = uniforms(SEED, 1, batch=5, num_draft=7)
    assert np.array_equal(accept, longer_accept[:2, :3]) and np.array_equal(sample, longer_sample[:2, :4])


def test_uniforms_differ_by_seed_offset_row_position_and_stream():
    accept, sample = uniforms(1, 0, batch=64, num_draft=8)
    draws = [
        accept.ravel(),
        sample.ravel(),
        *(array.ravel() for array in uniforms(1, 1, batch=64, num_draft=8)),
    ]
    draws += [array.ravel() for array in uniforms(2, 0, batch=64, num_draft=8)]
    drawn = np.concatenate(draws)
    # 3,264 draws out of 2**24 values: 0.3 repeats are expected.
    assert np.unique(drawn).size >= drawn.size - 4


def test_uniforms_are_multiples_of_2_to_the_minus_24_below_one():
    accept, sample = uniforms(SEED, 0, batch=1000, num_draft=50)
    for array in (accept, sample):
        grid = array.astype(np.float64) * 2**24
        assert np.array_equal(grid, np.floor(grid))
        assert 0 <= grid.min() < 2**24 / 1000 and 2**24 - 2**24 / 1000 < grid.max() <= 2**24 - 1


def test_uniforms_fill_the_unit_interval_evenly():
    accept, sample = uniforms(SEED, 0, batch=1000, num_draft=64)
    for array in (accept[:, ::2], accept[:, 1::2], sample[::2], sample[1::2]):
        counts = np.bincount((array.ravel() * 64).astype(int), minlength=64)
        statistic = ((counts - array.size / 64) ** 2 / (array.size / 64)).sum()
        assert CHI_SQUARE_63[0] < statistic < CHI_SQUARE_63[1], statistic


def test_uniforms_of_the_two_streams_are_independent():
    accept, sample = uniforms(SEED, 0, batch=1000, num_draft=64)
    cells = (accept * 8).astype(int) * 8 + (sample[:, :-1] * 8).astype(int)
    counts = np.bincount(cells.ravel(), minlength=64)
    statistic = ((counts - cells.size / 64) ** 2 / (cells.size / 64)).sum()
    assert CHI_SQUARE_63[0] < statistic < CHI_SQUARE_63[1], statistic


def test_uniforms_without_a_seed_take_one_from_the_operating_system(monkeypatch):
    monkeypatch.setattr(philox, "entropy_seed", lambda: SEED)
    accept, sample = uniforms(None, 3, batch=2, num_draft=2)
    expected_accept, expected_sample = uniforms(SEED, 3, batch=2, num_draft=2)
    assert np.array_equal(accept, expected_accept) and np.array_equal(sample, expected_sample)


def test_entropy_seed_is_eight_bytes_of_the_operating_system(monkeypatch):
    monkeypatch.setattr("os.urandom", lambda count: bytes(range(1, count + 1)))
    assert philox.entropy_seed() == 0x0807060504030201


def test_entropy_seed_differs_between_calls():
    assert len({philox.entropy_seed() for _ in range(8)}) == 8


class Index:
    """An integer of some other library."""

    def __init__(self, value: int) -> None:
        self.value = value

    def __index__(self) -> int:
        return self.value


@pytest.mark.parametrize("value", [5, np.int32(5), np.uint64(5), np.array(5), Index(5)], ids=lambda v: type(v).__name__)
def test_check_seed_and_offset_return_a_python_int(value):
    for check in (philox.check_seed, philox.check_offset):
        assert check(value) == 5 and type(check(value)) is int


def test_check_seed_and_offset_take_their_whole_range():
    assert [philox.check_seed(value) for value in (0, 2**64 - 1)] == [0, 2**64 - 1]
    assert [philox.check_offset(value) for value in (0, 2**32 - 1)] == [0, 2**32 - 1]
    assert philox.check_seed(np.uint64(2**64 - 1)) == 2**64 - 1


@pytest.mark.parametrize(
    "value, type_name",
    [
        (1.0, "float"),
        (True, "bool"),
        (np.bool_(True), r"bool_?"),
        (np.float32(1), "float32"),
        ("1", "str"),
        (None, "NoneType"),
        (np.array([1, 2]), "ndarray"),
    ],
    ids=["float", "bool", "numpy-bool", "float32", "str", "None", "array"],
)
def test_check_seed_and_offset_refuse_what_is_not_an_integer(value, type_name):
    with pytest.raises(TypeError, match=rf"^`seed` must be an integer: expected int, got {type_name}\. Pass an int"):
        philox.check_seed(value)
    with pytest.raises(TypeError, match=rf"^`offset` must be an integer: expected int, got {type_name}\. Pass an int"):
        philox.check_offset(value)


@pytest.mark.parametrize("value", [-1, 2**64])
def test_check_seed_refuses_what_does_not_fit(value):
    expected = r"expected an integer in \[0, 2\*\*64\)"
    remedy = r"Reduce it modulo 2\*\*64\.$"
    message = rf"^`seed` must fit in 64 bits: {expected}, got {value}\. {remedy}"
    with pytest.raises(ValueError, match=message):
        philox.check_seed(value)


@pytest.mark.parametrize("value", [-1, 2**32])
def test_check_offset_refuses_what_does_not_fit(value):
    expected = r"expected an integer in \[0, 2\*\*32\)"
    remedy = r"Reduce it modulo 2\*\*32\.$"
    message = rf"^`offset` must fit in 32 bits: {expected}, got {value}\. {remedy}"
    with pytest.raises(ValueError, match=message):
        philox.check_offset(value)


@pytest.mark.parametrize(
    "seed, error, message",
    [
        (
            [1, 2],
            ValueError,
            r"`seed` must be one integer or have shape \(batch,\): expected \(3,\), got \(2,\)\. Pass one",
        ),
        (
            np.zeros((3, 1), int),
            ValueError,
            r"`seed` must be one integer or have .*: expected \(3,\), got \(3, 1\)\.",
        ),
        (
            np.zeros(1, int),
            ValueError,
            r"`seed` must be one integer or have .*: expected \(3,\), got \(1,\)\.",
        ),
        ([1, 2, -3], ValueError, r"`seed\[2\]` must fit in 64 bits: .*, got -3\."),
        (np.array([1, -2, 3]), ValueError, r"`seed\[1\]` must fit in 64 bits: .*, got -2\."),
        ([1, 2.0, 3], TypeError, r"`seed\[1\]` must be an integer: expected int, got float\."),
        (np.array([1.0, 2.0, 3.0]), TypeError, r"`seed\[0\]` must be an integer: expected int, got float\."),
        (
            np.array([True, False, True]),
            TypeError,
            r"`seed\[0\]` must be an integer: expected int, got bool\.",
        ),
        ("abc", TypeError, r"`seed` must be an integer: expected int, got str\."),
        (1.5, TypeError, r"`seed` must be an integer: expected int, got float\."),
    ],
)
def test_uniforms_refuse_seeds_of_a_wrong_shape_type_or_value(seed, error, message):
    with pytest.raises(error, match=f"^{message}"):
        uniforms(seed, 0, batch=3, num_draft=1)


@pytest.mark.parametrize("name, bits", [("batch", 32), ("num_draft", 31)])
def test_uniforms_refuse_a_wrong_size(name, bits):
    sizes = {"batch": 1, "num_draft": 1}
    with pytest.raises(TypeError, match=f"^`{name}` must be an integer: expected int, got float"):
        uniforms(1, 0, **{**sizes, name: 2.0})
    with pytest.raises(ValueError, match=f"^`{name}` must fit in {bits} bits: .*, got -1"):
        uniforms(1, 0, **{**sizes, name: -1})


def test_uniforms_refuse_a_wrong_offset():
    with pytest.raises(ValueError, match="^`offset` must fit in 32 bits"):
        uniforms(1, 2**32, batch=1, num_draft=1)


def test_philox_imports_without_numpy():
    # A module that None stands for cannot be imported.
    script = (
        "import sys, importlib.util as util; sys.modules['numpy'] = None\n"
        f"spec = util.spec_from_file_location('philox', {philox.__file__!r})\n"
        "module = util.module_from_spec(spec); spec.loader.exec_module(module)\n"
        "print(module.uniform_scalar(0, 0, 0, 0, 0), module.check_seed(7), module.row_keys([7, 8], 2))\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == f"{0x6627E8 * 2.0**-24} 7 ([7, 8], [0, 0])\n"


def test_philox_examples_run():
    result = doctest.testmod(philox)
    assert result.attempted > 0 and result.failed == 0


@pytest.mark.parametrize(("name", "bits"), [("batch", 32), ("num_draft", 31)])
def test_uniforms_refuses_counts_that_do_not_fit(name, bits):
    for value in (-1, 2**bits):
        with pytest.raises(ValueError) as error:
            philox.uniforms(1, 0, **{"batch": 2, "num_draft": 3, name: value})
        assert str(error.value) == (
            f"`{name}` must fit in {bits} bits: expected an integer in [0, 2**{bits}), got {value}. "
            f"Pass how many there are, and draw parts where there are 2**{bits} or more."
        )
