"""Bad input gives the documented error before anything is launched, and the next call works."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from typing import Any

import arrays
import dpctl
import numpy as np
import pytest

from specverify_dpex import UsmArray, emitted_tokens, launch, uniforms, usm_array, verify

BATCH, NUM_DRAFT, VOCAB = 2, 3, 5
NAMES = ("draft_tokens", "draft_probs", "target_probs", "uniform_accept", "uniform_sample")
SHAPES = {
    "draft_tokens": (BATCH, NUM_DRAFT),
    "draft_probs": (BATCH, NUM_DRAFT, VOCAB),
    "target_probs": (BATCH, NUM_DRAFT + 1, VOCAB),
    "uniform_accept": (BATCH, NUM_DRAFT),
    "uniform_sample": (BATCH, NUM_DRAFT + 1),
}
AXES = {
    "draft_tokens": "(batch, num_draft)",
    "draft_probs": "(batch, num_draft, draft_vocab)",
    "target_probs": "(batch, num_draft + 1, vocab)",
    "uniform_accept": "(batch, num_draft)",
    "uniform_sample": "(batch, num_draft + 1)",
}


def good() -> dict[str, Any]:
    return {
        name: np.zeros(shape, "i8") if name == "draft_tokens" else np.full(shape, 0.5, "f4")
        for name, shape in SHAPES.items()
    }


@pytest.fixture
def no_launch(monkeypatch: pytest.MonkeyPatch, device: Any) -> Any:
    """Launches fail the test; afterwards a good call still works."""

    def launched(*arguments: Any) -> None:
        pytest.fail("launched before the error")

    with monkeypatch.context() as patch:
        patch.setattr(launch.Launch, "submit", launched)
        yield
    assert verify(**good()).accepted.tolist() == [NUM_DRAFT] * BATCH


def message(error: pytest.ExceptionInfo[BaseException]) -> str:
    return str(error.value)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("value", [3, "text", [[1, 2], [3, 4]], object()], ids=["int", "str", "list", "object"])
def test_verify_refuses_what_is_no_array(no_launch, name, value):
    with pytest.raises(TypeError) as error:
        verify(**{**good(), name: value})
    assert message(error) == (
        f"`{name}` must be an array: expected one of dpnp, dpctl.tensor, dpnp.tensor, torch or numpy, or an object "
        f"with `__sycl_usm_array_interface__` or `__dlpack__`, got {type(value).__name__}. "
        "Use `specverify_dpex.UsmArray.from_list` to copy lists to the device."
    )


@pytest.mark.parametrize("name", ["draft_tokens", "target_probs"])
def test_verify_refuses_none(no_launch, name):
    with pytest.raises(TypeError, match=f"^`{name}` must be an array: expected .* got NoneType"):
        verify(**{**good(), name: None})


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", ["float64", "int16", "bool", "complex64"])
def test_verify_refuses_dtypes(no_launch, name, dtype):
    expected, first = {"draft_tokens": ("int64 or int32", "int64")}.get(
        name, ("float32, float16 or bfloat16" if name.endswith("probs") else "float32", "float32")
    )
    arguments = good()
    arguments[name] = arguments[name].astype(dtype)
    with pytest.raises(TypeError) as error:
        verify(**arguments)
    shown = {"complex64": "c8", "int16": "i2"}.get(dtype, dtype)
    assert message(error) == (
        f"`{name}` must have dtype {expected}: got {shown}. Convert it, for example with {name}.astype('{first}')"
    )


@pytest.mark.parametrize("name", NAMES)
def test_verify_refuses_every_wrong_axis(kind, queue, no_launch, name):
    for axis, extent in enumerate(SHAPES[name]):
        if (name, axis) in (("draft_tokens", 0), ("draft_tokens", 1), ("target_probs", 2)):
            continue  # these define what the others must match
        for wrong in (extent - 1, extent + 1, 0):
            if (name, axis) == ("draft_probs", 2):
                continue  # the draft's vocabulary may be smaller
            shape = (*SHAPES[name][:axis], wrong, *SHAPES[name][axis + 1 :])
            arguments = good()
            arguments[name] = np.zeros(shape, arguments[name].dtype)
            wanted = ", ".join(
                "any" if name.endswith("_probs") and position == 2 else str(right)
                for position, right in enumerate(SHAPES[name])
            )
            with pytest.raises(ValueError) as error:
                verify(**{key: kind.make(value, queue) for key, value in arguments.items()})
            assert message(error) == f"`{name}` must have shape {AXES[name]}: expected ({wanted}), got {shape}"


@pytest.mark.parametrize("axis", [0, 1])
def test_verify_names_the_array_that_does_not_match_the_tokens(no_launch, axis):
    arguments = good()
    arguments["draft_tokens"] = np.zeros((BATCH + (axis == 0), NUM_DRAFT + (axis == 1)), "i8")
    with pytest.raises(ValueError, match=r"^`target_probs` must have shape \(batch, num_draft \+ 1, vocab\)"):
        verify(**arguments)


def test_verify_refuses_a_draft_of_more_tokens_than_the_target(no_launch):
    arguments = good()
    arguments["target_probs"] = np.zeros((BATCH, NUM_DRAFT + 1, VOCAB - 1), "f4")
    with pytest.raises(ValueError) as error:
        verify(**arguments)
    assert message(error) == (
        "`draft_probs` must not have more columns than `target_probs`: expected at most 4, got 5. "
        "The target cannot emit what is beyond: pass draft_probs[:, :, :4]"
    )


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("change", [-1, 1], ids=["one-axis-less", "one-axis-more"])
def test_verify_refuses_ranks(no_launch, name, change):
    arguments = good()
    arguments[name] = arguments[name][0] if change < 0 else arguments[name][None]
    with pytest.raises(ValueError) as error:
        verify(**arguments)
    assert message(error).startswith(f"`{name}` must have shape {AXES[name]}: expected (")
    assert message(error).endswith(f"got {arguments[name].shape}")


@pytest.mark.parametrize(
    ("vocab", "text"),
    [
        (0, "have a token along its last axis: expected 1 to 2**20, got 0"),
        (
            2**20 + 1,
            "have at most 2**20 tokens along its last axis: got 1048577. "
            "Cut the unused columns of a padded vocabulary off",
        ),
    ],
)
def test_verify_refuses_vocabularies(no_launch, vocab, text):
    target = np.broadcast_to(np.float32(0), (1, 1, vocab))
    with pytest.raises(ValueError) as error:
        verify(np.zeros((1, 0), "i8"), None, target)
    assert message(error) == f"`target_probs` must {text}"


def test_verify_refuses_more_positions_than_a_kernel_counts(no_launch):
    tokens = np.broadcast_to(np.int64(0), (1, 2**30))
    with pytest.raises(ValueError) as error:
        verify(tokens, None, np.zeros((1, 1, 2), "f4"))
    assert message(error) == (
        "`draft_tokens` must have fewer than 2**30 positions: got 1073741824. Verify fewer at a time"
    )


@pytest.mark.parametrize("name", NAMES[1:])
def test_verify_refuses_mixed_kinds(queue, no_launch, name):
    arguments = good()
    arguments[name] = arrays.usm_array(arguments[name], queue)
    with pytest.raises(TypeError) as error:
        verify(**arguments)
    assert message(error) == (
        f"`{name}` must be of the same kind as `draft_tokens`: expected numpy.ndarray, got specverify_dpex.UsmArray. "
        "Convert one of them"
    )


@pytest.mark.parametrize("name", [name for name in NAMES if name != "target_probs"])
def test_verify_refuses_mixed_queues(device, no_launch, name):
    one, other = dpctl.SyclQueue(device), dpctl.SyclQueue(device)
    arguments = {key: arrays.usm_array(value, other if key == name else one) for key, value in good().items()}
    with pytest.raises(ValueError) as error:
        verify(**arguments)
    place = device.name.strip()
    assert message(error) == (
        f"`{name}` must be on the queue of `target_probs`: expected the queue at {one.addressof_ref():#x} of {place}, "
        f"got the queue at {other.addressof_ref():#x} of {place}. "
        f"Copy it there, for example with UsmArray.from_list({name}.tolist(), {name}.dtype, "
        "sycl_queue=target_probs.sycl_queue)"
    )


def test_what_to_do_about_queues_works(device):
    one, other = dpctl.SyclQueue(device), dpctl.SyclQueue(device)
    kinds = [
        kind for kind in arrays.kinds() if kind.name in ("usm-array", "interface", "dpnp") or "tensor" in kind.name
    ]
    for kind in kinds:
        arguments = {key: kind.make(value, other if key == "draft_probs" else one) for key, value in good().items()}
        with pytest.raises(ValueError, match="^`draft_probs` must be on the queue of `target_probs`: ") as error:
            verify(**arguments)
        if kind.name == "interface":
            assert message(error).endswith(". Allocate it there")
            continue
        remedy = message(error).partition("Copy it there, for example with ")[2]
        arguments["draft_probs"] = eval(remedy, {"UsmArray": UsmArray}, arguments)
        assert kind.read(verify(**arguments).accepted).tolist() == [NUM_DRAFT] * BATCH


def test_what_to_do_about_queues_of_results_and_seeds(device):
    one, other = dpctl.SyclQueue(device), dpctl.SyclQueue(device)
    arguments = {key: arrays.usm_array(value, one) for key, value in good().items()}
    out = (UsmArray((BATCH,), "int64", sycl_queue=one), UsmArray((BATCH,), "int64", sycl_queue=other))
    with pytest.raises(
        ValueError, match=r"^`out\[1\]` must be on the queue of `target_probs`: .*\. Allocate it there$"
    ):
        verify(**arguments, out=out)
    seeds = UsmArray((BATCH,), "uint64", sycl_queue=other)
    with pytest.raises(ValueError, match=r"UsmArray\.from_list\(seed\.tolist\(\), seed\.dtype, sycl_queue=like\."):
        uniforms(seeds, 0, BATCH, NUM_DRAFT, like=arguments["target_probs"])
    emitted = [arguments["draft_tokens"], UsmArray.from_list([1, 2], "int64", sycl_queue=other), out[1]]
    with pytest.raises(ValueError, match=r"^`draft_tokens` must be on the queue of `accepted`: .*draft_tokens\.tolist"):
        emitted_tokens(*emitted)


@pytest.mark.parametrize("name", ["draft_probs", "target_probs"])
def test_verify_refuses_uint16_that_nothing_is_said_about(no_launch, name):
    arguments = good()
    arguments[name] = arguments[name].astype("u2")
    with pytest.raises(TypeError) as error:
        verify(**arguments)
    assert message(error) == (
        f"`{name}` must have dtype float32, float16 or bfloat16: got uint16. "
        "Where it holds the bits of bfloat16 values, pass dtype='bfloat16'"
    )


@pytest.mark.parametrize("dtype", ["float16", "uint16", 2, np.float32])
def test_verify_refuses_other_meanings_of_uint16(no_launch, dtype):
    with pytest.raises(ValueError) as error:
        verify(**good(), dtype=dtype)
    assert message(error) == (
        f"`dtype` must say what uint16 probabilities hold: expected 'bfloat16' or None, got {dtype!r}"
    )


@pytest.mark.parametrize("name", ["num_draft", "deterministic_draft", "greedy"])
def test_verify_refuses_what_is_not_one_for_each_sequence(no_launch, name):
    dtype, expected, others = ("i4", "int64 or int32", "f4") if name == "num_draft" else ("?", "bool", "u1")
    for shape in ((BATCH + 1,), (BATCH, 1), (0,), ()):
        with pytest.raises((ValueError, TypeError), match=f"^`{name}` must "):
            verify(**good(), **{name: np.zeros(shape, dtype)})
    with pytest.raises(TypeError, match=f"^`{name}` must have dtype {expected}: got "):
        verify(**good(), **{name: np.zeros(BATCH, others)})


def test_verify_refuses_a_mask_of_drafts_that_have_no_probabilities(no_launch):
    arguments = {**good(), "draft_probs": None}
    with pytest.raises(ValueError) as error:
        verify(**arguments, deterministic_draft=np.zeros(BATCH, bool))
    assert message(error) == (
        "`deterministic_draft` must be None where `draft_probs` is: all drafts are deterministic then. Leave it out"
    )


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"seed": -1}, ValueError, "`seed` must fit in 64 bits: expected an integer in [0, 2**64), got -1"),
        ({"seed": 2**64}, ValueError, "`seed` must fit in 64 bits"),
        ({"seed": 1.0}, TypeError, "`seed` must be an integer: expected int, got float"),
        ({"seed": True}, TypeError, "`seed` must be an integer: expected int, got bool"),
        ({"seed": "x"}, TypeError, "`seed` must be an integer: expected int, got str"),
        (
            {"seed": [1, 2]},
            TypeError,
            "`seed` must be an integer: expected int, got list. Pass an int, or a (batch,) uint64 array for a seed of "
            "each sequence.",
        ),
        ({"seed": np.zeros(3, "u8")}, ValueError, "`seed` must have shape (batch,): expected (2,), got (3,)"),
        ({"seed": np.zeros((2, 1), "u8")}, ValueError, "`seed` must have shape (batch,): expected (2,), got (2, 1)"),
        ({"seed": np.zeros(2, "i8")}, TypeError, "`seed` must have dtype uint64: got int64"),
        ({"seed": 1, "offset": -1}, ValueError, "`offset` must fit in 32 bits: expected an integer in [0, 2**32)"),
        ({"seed": 1, "offset": 2**32}, ValueError, "`offset` must fit in 32 bits"),
        ({"seed": 1, "offset": 0.5}, TypeError, "`offset` must be an integer: expected int, got float"),
    ],
)
def test_verify_refuses_seeds_and_offsets(no_launch, options, error, text):
    arguments = {**good(), "uniform_accept": None, "uniform_sample": None}
    with pytest.raises(error) as raised:
        verify(**arguments, **options)
    assert message(raised).startswith(text)


def test_verify_refuses_a_seed_that_draws_nothing(no_launch):
    with pytest.raises(ValueError) as error:
        verify(**good(), seed=1)
    assert message(error) == (
        "`seed` must be None where both uniforms are given: nothing is drawn from it. "
        "Leave out the uniforms that it should draw"
    )


@pytest.mark.parametrize(
    "change",
    [
        {"data": (4096, False)},
        {"data": None},
        {"syclobj": None},
        {"shape": 3},
        {"typestr": 4},
        {"offset": "x"},
        {"version": 9},
        {"typestr": ">f4"},
        {"strides": (12, 1)},
        {"shape": (BATCH, -1, VOCAB)},
    ],
    ids=lambda change: next(iter(change)),
)
def test_verify_refuses_interfaces_that_lie(queue, no_launch, change):
    arguments = {
        name: arrays.Interface(owner.__sycl_usm_array_interface__, owner)
        for name, owner in ((name, arrays.usm_array(value, queue)) for name, value in good().items())
    }
    broken = {**arguments["target_probs"].__sycl_usm_array_interface__, **change}
    arguments["target_probs"] = arrays.Interface(broken, arguments["target_probs"])
    with pytest.raises(BufferError) as error:
        verify(**arguments)
    assert message(error).startswith(
        "`target_probs` must be USM memory as its `__sycl_usm_array_interface__` describes it: "
    )


def test_verify_refuses_a_strided_vocabulary_that_it_cannot_copy(queue, no_launch):
    arguments = {}
    for name, value in good().items():
        owner = arrays.usm_array(np.repeat(value, 2, axis=-1), queue)
        interface = owner.__sycl_usm_array_interface__
        if name == "target_probs":
            full = owner.shape
            interface.update(shape=value.shape, strides=(full[1] * full[2], full[2], 2))
        else:
            owner = arrays.usm_array(value, queue)
            interface = owner.__sycl_usm_array_interface__
        arguments[name] = arrays.Interface(interface, owner)
    with pytest.raises(ValueError) as error:
        verify(**arguments)
    assert message(error) == (
        "`target_probs` must be contiguous along its last axis: expected a stride of 1, got 2. "
        "Copy it, or pass it as an array of a library that can"
    )


def test_verify_without_a_device(monkeypatch):
    def none_found() -> None:
        raise dpctl.SyclDeviceCreationError("none")

    monkeypatch.setattr(usm_array, "_default_queue", None)
    monkeypatch.setattr(dpctl, "select_default_device", none_found)
    with pytest.raises(RuntimeError) as error:
        verify(**good())
    assert message(error) == (
        "no SYCL device was found. Run `specverify-dpex doctor` to see what is missing, or install the CPU device: "
        "pip install 'specverify-dpex[cpu]'"
    )


def test_kernels_variable_refuses_other_values(monkeypatch):
    monkeypatch.setenv("SPECVERIFY_DPEX_KERNELS", "sauce")
    with pytest.raises(ValueError, match="^`SPECVERIFY_DPEX_KERNELS` must be 'modules' or 'source': got 'sauce'$"):
        launch.from_source()


def test_kernels_from_source_without_their_compiler(device):
    code = (
        "import sys\n"
        "sys.modules['numba_dpex'] = None\n"
        "from specverify_dpex import UsmArray, verify\n"
        "tokens, target = UsmArray.from_list([[0]], 'int64'), UsmArray.from_list([[[1.0]] * 2], 'float32')\n"
        "for _ in range(2):\n"
        "    try:\n"
        "        verify(tokens, None, target)\n"
        "    except ImportError as error:\n"
        "        print(error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "SPECVERIFY_DPEX_KERNELS": "source"},
    )
    assert done.returncode == 0, done.stderr
    first, again = done.stdout.splitlines()
    assert first == again
    assert re.fullmatch(
        "SPECVERIFY_DPEX_KERNELS=source compiles the kernels in the process, but their compiler is missing: .*numba.*"
        r"\. Install it with pip install 'specverify-dpex\[compile\]' in an environment of its own, on Python 3.9 to "
        "3.11, or unset SPECVERIFY_DPEX_KERNELS",
        first,
    )


def test_an_interrupted_launch_gives_its_event_back(queue, monkeypatch):
    deleted = []
    delete = launch._delete_event

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(launch, "_new_capsule", interrupted)
    monkeypatch.setattr(launch, "_delete_event", lambda reference: deleted.append(delete(reference)))
    like = UsmArray((1,), "float32", sycl_queue=queue)
    with pytest.raises(KeyboardInterrupt):
        uniforms(1, 0, 2, 3, like=like)
    assert len(deleted) == 1


def test_a_refused_launch_raises_and_the_next_one_works(queue):
    refused = launch.Launch(launch.kernel(queue, "uniforms"), queue, {}, (1,), 10**9)
    with pytest.raises(RuntimeError, match="^the device refused a launch of"):
        refused.submit(())
    accept, sample = uniforms(1, 0, 2, 3, like=UsmArray((1,), "float32", sycl_queue=queue))
    np.testing.assert_array_equal(accept.tolist(), uniforms(1, 0, 2, 3)[0])
    np.testing.assert_array_equal(sample.tolist(), uniforms(1, 0, 2, 3)[1])


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (((2,), "float8"), "`dtype` must name an element type: expected one of ['bool', 'int32', 'int64', 'uint16', "
                           "'uint32', 'uint64', 'float16', 'float32', 'float64'], got 'float8'"),
    ],
)  # fmt: skip
def test_usm_array_refuses_dtypes(device, arguments, text):
    with pytest.raises(ValueError) as error:
        UsmArray(*arguments)
    assert message(error) == text


def test_usm_array_refuses_memory_that_is_too_small(queue):
    memory = UsmArray((4,), "int64", sycl_queue=queue).memory
    with pytest.raises(ValueError, match="^`memory` must hold the array: expected 40 bytes, got 32$"):
        UsmArray((4,), "int64", memory=memory, byte_offset=8)


def test_usm_array_refuses_memory_of_another_context(device):
    try:
        part = device.create_sub_devices(partition=[1, 1])[0]
    except dpctl.SyclSubDeviceCreationError:
        pytest.skip("the device has no parts")
    other = dpctl.SyclQueue(dpctl.SyclContext(part), part)
    memory = UsmArray((4,), "int64", sycl_queue=other).memory
    assert UsmArray((4,), "int64", memory=memory).sycl_queue == other
    with pytest.raises(ValueError) as error:
        UsmArray((4,), "int64", sycl_queue=dpctl.SyclQueue(device), memory=memory)
    assert message(error) == (
        "`memory` must be of the context of `sycl_queue`: expected memory that a queue of it allocated, got another "
        "context's"
    )


@pytest.mark.parametrize("dtype", ["int64", "bool", "float16"])
@pytest.mark.parametrize(
    ("values", "expected"),
    [([[1, 2], [3]], "2 along axis 1"), ([[1, 2], 3], "2 along axis 1"), ([1, [2, 3]], "no axis 1")],
    ids=["short", "number", "list"],
)
def test_usm_array_refuses_ragged_lists(device, values, expected, dtype):
    with pytest.raises(ValueError, match=f"^`values` must have rows of equal length: expected {expected}$"):
        UsmArray.from_list(values, dtype)


def test_usm_array_refuses_negative_extents(device):
    with pytest.raises(ValueError, match=r"^`shape` must not have negative extents: got \(1, -1\)$"):
        UsmArray((1, -1), "int64")


@pytest.mark.parametrize("byte_offset", [-8, 4])
def test_usm_array_refuses_offsets(queue, byte_offset):
    memory = UsmArray((4,), "int64", sycl_queue=queue).memory
    with pytest.raises(ValueError) as error:
        UsmArray((1,), "int64", memory=memory, byte_offset=byte_offset)
    assert message(error) == (
        "`byte_offset` must be a multiple of the element's size: expected one of 8 bytes, not negative, "
        f"got {byte_offset}"
    )


def test_verify_refuses_masked_arrays(no_launch):
    arguments = good()
    arguments["target_probs"] = np.ma.masked_array(arguments["target_probs"])
    with pytest.raises(TypeError) as error:
        verify(**arguments)
    assert message(error) == (
        "`target_probs` must not be masked: a kernel reads all elements. Pass target_probs.filled(0)"
    )


def test_verify_refuses_elements_of_no_bytes(no_launch):
    with pytest.raises(TypeError, match="^`draft_tokens` must have dtype int64 or int32: got V0"):
        verify(**{**good(), "draft_tokens": np.zeros((BATCH, NUM_DRAFT), "V0")})


def test_verify_takes_subclasses_with_their_base_class(device, tmp_path):
    arguments = good()
    expected = verify(**arguments)
    mapped = np.memmap(tmp_path / "probs", "f4", "w+", shape=SHAPES["target_probs"])
    mapped[:] = arguments["target_probs"]
    result = verify(**{**arguments, "target_probs": mapped, "draft_tokens": arguments["draft_tokens"].view(np.matrix)})
    np.testing.assert_array_equal(result.accepted, expected.accepted)
    np.testing.assert_array_equal(result.next_token, expected.next_token)
