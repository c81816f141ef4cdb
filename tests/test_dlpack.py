"""DLPack: any library's capsules are read in place, ours are read by any library, and nobody's memory leaks or dies."""

from __future__ import annotations

import ctypes
import gc
import subprocess
import sys
from typing import Any

import arrays
import dpctl
import generate
import numpy as np
import pytest

from specverify_dpex import UsmArray, capsule, dlpack, reference, usm_array, verify

ONEAPI, CPU, CUDA = 14, 1, 2
NAMES = ("draft_tokens", "draft_probs", "target_probs", "uniform_accept", "uniform_sample")

capsule_name = ctypes.PYFUNCTYPE(ctypes.c_char_p, ctypes.py_object)(("PyCapsule_GetName", ctypes.pythonapi))
capsule_pointer = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", ctypes.pythonapi)
)
new_capsule = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)(
    ("PyCapsule_New", ctypes.pythonapi)
)


class Tensor(ctypes.Structure):
    """DLTensor of dlpack.h."""

    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    ]


Deleter = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


class Legacy(ctypes.Structure):
    """DLManagedTensor."""

    _fields_ = [("tensor", Tensor), ("context", ctypes.c_void_p), ("deleter", Deleter)]
    capsule_name = b"dltensor"


class Versioned(ctypes.Structure):
    """DLManagedTensorVersioned."""

    _fields_ = [
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("context", ctypes.c_void_p),
        ("deleter", Deleter),
        ("flags", ctypes.c_uint64),
        ("tensor", Tensor),
    ]
    capsule_name = b"dltensor_versioned"


PLACES = pytest.mark.parametrize("place", [ONEAPI, CPU], ids=["oneapi", "host"])
LAYOUTS = pytest.mark.parametrize("layout", [Legacy, Versioned], ids=["legacy", "versioned"])


class Producer:
    """Exports an array by hand, as exactly what a test says, and counts what its consumer gives back."""

    def __init__(self, array: Any, layout: type = Versioned, *, device: tuple[int, int] | None = None, **fields: Any):
        usm = isinstance(array, UsmArray)
        pointer = array.memory._pointer if usm else array.ctypes.data
        dtype = np.dtype(array.dtype)
        self.owner = array
        self.deleted = 0
        self.device = device or (array.__dlpack_device__() if usm else (CPU, 0))
        self.options: list[dict[str, Any]] = []
        self._layout = layout
        self._shape = (ctypes.c_int64 * len(array.shape))(*array.shape)
        strides = (
            capsule.contiguous_strides(array.shape) if usm else [stride // array.itemsize for stride in array.strides]
        )
        self._strides = (ctypes.c_int64 * len(array.shape))(*strides)
        self._delete = Deleter(self._count)  # must live as long as the capsule
        self._managed = layout()
        self._managed.deleter = self._delete
        tensor = self._managed.tensor
        tensor.data = pointer
        tensor.device_type, tensor.device_id = self.device
        tensor.ndim = len(array.shape)
        tensor.code, tensor.bits, tensor.lanes = "iuf".index(dtype.kind), 8 * dtype.itemsize, 1
        tensor.shape = ctypes.cast(self._shape, ctypes.POINTER(ctypes.c_int64))
        tensor.strides = ctypes.cast(self._strides, ctypes.POINTER(ctypes.c_int64))
        if layout is Versioned:
            self._managed.major = 1
        for name, value in fields.items():
            setattr(tensor if hasattr(tensor, name) else self._managed, name, value)

    def _count(self, address: int) -> None:
        assert address == ctypes.addressof(self._managed)
        self.deleted += 1

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.device

    def __dlpack__(self, **options: Any) -> Any:
        self.options.append(options)
        return new_capsule(ctypes.addressof(self._managed), self._layout.capsule_name, None)


def case_inputs(queue: Any, **options: Any) -> tuple[generate.Case, list[Any]]:
    case = generate.random_case(
        7, shape=(4, 3, 257), dtype="float32", token_dtype="int64", with_draft_probs=True, **options
    )
    return case, [arrays.usm_array(array, queue) for array in case.arrays]


def assert_right(result: Any, case: generate.Case) -> None:
    expected = reference.verify(*case.arrays)
    assert np.asarray(result.accepted.tolist()).tolist() == expected.accepted.tolist()
    assert np.asarray(result.next_token.tolist()).tolist() == expected.next_token.tolist()


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> dict[str, dlpack.View]:
    """The views that verify() made of its arguments, by name."""
    views: dict[str, dlpack.View] = {}

    def record(cls: type) -> None:
        original = cls.view
        monkeypatch.setattr(cls, "view", lambda self, a, n: views.setdefault(n, original(self, a, n)))

    for cls in (dlpack._DlpackSyclKind, dlpack._DlpackHostKind):
        record(cls)
    return views


# Reading


@LAYOUTS
def test_kernels_read_the_exporters_own_memory(queue, seen, layout):
    case, inputs = case_inputs(queue)
    producers = [Producer(array, layout) for array in inputs]
    result = verify(*producers)
    assert type(result.accepted) is UsmArray
    assert_right(result, case)
    for name, array in zip(NAMES, inputs):
        assert seen[name].pointer == array.memory._pointer


def test_array_libraries_capsules_are_read_in_place(queue):
    tensor = arrays.tensor_module()
    if tensor is None:
        pytest.fail("neither dpctl.tensor nor dpnp.tensor is installed: the sessions of noxfile.py have one")
    base = tensor.asarray(np.arange(60, dtype="f4").reshape(3, 4, 5), sycl_queue=queue)
    for view in (base, base[1:], base[:, ::-1], base[::2, 1:3, :4], tensor.permute_dims(base, (1, 0, 2))):
        for versioned in (False, True):
            read = capsule.read(capsule.export(view, versioned), "array")
            assert (read.pointer, read.shape, read.strides, read.dtype) == (
                view._pointer, view.shape, view.strides, "f4"
            )  # fmt: skip
            assert read.device == tuple(map(int, view.__dlpack_device__()))


@LAYOUTS
@PLACES
def test_byte_offset_moves_the_first_element(queue, layout, place):
    case, inputs = case_inputs(queue)
    producers = []
    for array in case.arrays:
        padded = np.concatenate([np.full(3, 1, array.dtype), array.reshape(-1)])
        whole = arrays.usm_array(padded, queue) if place == ONEAPI else padded
        pointer = whole.memory._pointer if place == ONEAPI else whole.ctypes.data
        like = arrays.usm_array(array, queue) if place == ONEAPI else array
        producers.append(Producer(like, layout, data=pointer, byte_offset=3 * array.itemsize))
        producers[-1].owner = whole
    assert_right(verify(*producers), case)


@LAYOUTS
@PLACES
def test_no_strides_mean_c_order(queue, layout, place):
    case, inputs = case_inputs(queue)
    producers = [Producer(array, layout) for array in (inputs if place == ONEAPI else case.arrays)]
    for producer in producers:
        producer._managed.tensor.strides = None
    assert_right(verify(*producers), case)


@PLACES
def test_strided_views_are_read(queue, place):
    case, _ = case_inputs(queue)
    producers = []
    for array in case.arrays:
        wide = np.repeat(array, 2, axis=0)
        like = arrays.usm_array(wide, queue) if place == ONEAPI else wide
        producer = Producer(like)
        producer._shape[0] //= 2
        producer._strides[0] *= 2
        producers.append(producer)
    assert_right(verify(*producers), case)


def test_host_views_of_any_strides_are_read(queue):
    case, _ = case_inputs(queue)
    reversed_ = [np.ascontiguousarray(array[..., ::-1])[..., ::-1] for array in case.arrays]
    assert_right(verify(*map(Producer, reversed_)), case)


def test_a_vocabulary_with_strides_on_the_device_is_refused(queue):
    case, inputs = case_inputs(queue)
    producers = [Producer(array) for array in inputs]
    wide = Producer(arrays.usm_array(np.repeat(case.target_probs, 2, axis=2), queue))
    wide._shape[2] //= 2
    wide._strides[2] = 2
    producers[2] = wide
    with pytest.raises(ValueError, match="^`target_probs` must be contiguous along its last axis: expected a stride"):
        verify(*producers)


@PLACES
def test_read_only_arrays_are_read_and_left_alone(queue, place):
    case, inputs = case_inputs(queue)
    producers = [Producer(array, flags=1) for array in (inputs if place == ONEAPI else case.arrays)]
    before = [array.copy() for array in case.arrays]
    assert_right(verify(*producers), case)
    for array, old in zip(inputs if place == ONEAPI else case.arrays, before):
        np.testing.assert_array_equal(array.tolist(), old.tolist())


@LAYOUTS
@pytest.mark.parametrize("flags", [0, 1, 2, 3])
def test_capsules_say_whether_they_are_read_only(layout, flags):
    fields = {"flags": flags} if layout is Versioned else {}  # a legacy capsule cannot say
    read = capsule.read(Producer(np.zeros(3, "f4"), layout, **fields).__dlpack__(), "array")
    assert read.read_only is (layout is Versioned and flags % 2 == 1)


@LAYOUTS
def test_strides_may_lie_anywhere(layout):
    producer = Producer(np.zeros((2, 3, 4), "f4"), layout)
    together = (ctypes.c_int64 * 6)(2, 3, 4, 12, 4, 1)
    for shape_at, strides_at in [(0, 24), (0, None)]:
        start = ctypes.addressof(together)
        pointer = ctypes.POINTER(ctypes.c_int64)
        producer._managed.tensor.shape = ctypes.cast(start + shape_at, pointer)
        producer._managed.tensor.strides = None if strides_at is None else ctypes.cast(start + strides_at, pointer)
        read = capsule.read(producer.__dlpack__(), "array")
        assert (read.shape, read.strides) == ((2, 3, 4), (12, 4, 1))


def test_elements_need_memory():
    assert capsule.as_numpy(0, (2, 0), (1, 1), "f4", None).shape == (2, 0)
    with pytest.raises(BufferError) as error:
        capsule.as_numpy(0, (2, 3), (3, 1), "f4", None)
    assert str(error.value) == "an array of shape (2, 3) must have memory: got a null pointer"


@LAYOUTS
@PLACES
@pytest.mark.parametrize("shape", [(0, 2, 5), (2, 0, 5)], ids=["no-batch", "no-drafts"])
def test_arrays_without_elements_have_no_memory(queue, layout, place, shape):
    batch, num_draft, vocab = shape
    made = (
        np.zeros((batch, num_draft), "i8"),
        np.zeros((batch, num_draft, vocab), "f4"),
        np.ones((batch, num_draft + 1, vocab), "f4"),
        np.zeros((batch, num_draft), "f4"),
        np.zeros((batch, num_draft + 1), "f4"),
    )
    producers = []
    for array in made:
        like = arrays.usm_array(array, queue) if place == ONEAPI else array
        producers.append(Producer(like, layout, **({} if array.size else {"data": None})))
    result = verify(*producers)
    assert (result.accepted.tolist(), result.next_token.tolist()) == ([0] * batch, [0] * batch)


def test_options_that_a_library_does_not_know_are_left_out(queue):
    case, inputs = case_inputs(queue)

    class OldProducer(Producer):
        def __dlpack__(self, stream: Any = None) -> Any:
            self.options.append({"stream": stream})
            return super().__dlpack__()

    producers = [OldProducer(array, Legacy) for array in inputs]
    for _ in range(2):
        assert_right(verify(*producers), case)
    assert producers[0].options == [{"stream": None}, {}] * 2


def test_one_arrays_own_error_changes_nothing_for_the_next(queue):
    case, inputs = case_inputs(queue)

    class Failing(Producer):
        def __dlpack__(self, **options: Any) -> Any:
            exported = super().__dlpack__(**options)
            if getattr(self, "broken", False):
                raise TypeError("a bug of this library's")
            return exported

    producers = [Failing(array) for array in inputs]
    producers[0].broken = True
    with pytest.raises(TypeError, match="^a bug of this library's$"):
        verify(*producers)
    producers[0].broken = False
    result = verify(*producers)
    assert_right(result, case)
    assert producers[0].options[-1] == {"max_version": (1, 0), "stream": result.accepted.sycl_queue}


def test_libraries_are_told_the_queue(queue):
    case, inputs = case_inputs(queue)
    producers = [Producer(array) for array in inputs]
    result = verify(*producers)
    assert producers[0].options == [{"max_version": (1, 0), "stream": result.accepted.sycl_queue}]


def test_work_of_the_array_library_comes_first(queue):
    tensor = arrays.tensor_module()
    case, _ = case_inputs(queue)
    tokens, draft, target, accept, sample = (tensor.asarray(array, sycl_queue=queue) for array in case.arrays)
    other = dpctl.SyclQueue(queue.sycl_context, queue.sycl_device)
    for elsewhere in (None, other):
        for _ in range(50):
            produced = tensor.multiply(target, tensor.asarray(1, dtype="f4", sycl_queue=queue))
            if elsewhere is not None:
                produced = produced.to_device(elsewhere)
            result = verify(*map(arrays.Dlpack, (tokens, draft, produced, accept, sample)))
            assert_right(result, case)


@PLACES
def test_results_go_back_through_the_arrays_own_library(queue, place):
    tensor = arrays.tensor_module()
    library = tensor if place == ONEAPI else np

    class Standard(Producer):
        def __array_namespace__(self) -> Any:
            return library

    case, inputs = case_inputs(queue)
    result = verify(*map(Standard, inputs if place == ONEAPI else case.arrays))
    expected = reference.verify(*case.arrays)
    for array, right in zip(result, expected):
        assert type(array) is (tensor.usm_ndarray if place == ONEAPI else np.ndarray)
        np.testing.assert_array_equal(tensor.asnumpy(array) if place == ONEAPI else array, right)


# Refusals


def refusal(queue: Any, error: type[Exception], **change: Any) -> str:
    """The message when one argument is changed, with nothing of it kept."""
    _, inputs = case_inputs(queue)
    producers = [Producer(array) for array in inputs]
    producers[2] = changed = Producer(inputs[2], **change)
    with pytest.raises(error) as raised:
        verify(*producers)
    text = str(raised.value)
    del raised
    gc.collect()
    assert changed.deleted == len(changed.options)
    return text


def test_a_capsule_is_consumed_once(queue):
    class Once(Producer):
        def __dlpack__(self, **options: Any) -> Any:
            self.capsule = getattr(self, "capsule", None) or super().__dlpack__()
            return self.capsule

    case, inputs = case_inputs(queue)
    producers = [Once(array) for array in inputs]
    assert_right(verify(*producers), case)
    with pytest.raises(BufferError) as error:
        verify(*producers)
    assert str(error.value) == (
        "`draft_tokens` must give a new DLPack capsule for each use: got one that was consumed before. "
        "Export the array again"
    )
    assert [producer.deleted for producer in producers] == [1] * 5


@pytest.mark.parametrize("value", [3, None, b"dltensor"], ids=["int", "none", "bytes"])
def test_what_is_no_capsule_is_refused(value):
    with pytest.raises(BufferError, match=f"^`x` must give a DLPack capsule: got {type(value).__name__}$"):
        capsule.read(value, "x")


def test_a_capsule_of_something_else_is_refused(queue):
    strange = new_capsule(queue.addressof_ref(), b"SyclQueueRef", None)
    with pytest.raises(BufferError, match="^`x` must give a new DLPack capsule for each use: got b'SyclQueueRef'"):
        capsule.read(strange, "x")


def test_a_layout_of_the_future_is_refused_and_given_back(queue):
    assert refusal(queue, BufferError, major=2, minor=3) == (
        "`target_probs` must give a DLPack capsule of version 1.x: got 2.3. Its library was asked for an older one"
    )


def test_memory_of_another_device_is_refused(queue):
    _, inputs = case_inputs(queue)
    producers = [Producer(array) for array in inputs]
    producers[0].device = (CUDA, 0)
    with pytest.raises(BufferError) as error:
        verify(*producers)
    assert str(error.value) == (
        "`draft_tokens` must be on a SYCL device or on the host: expected DLPack's device type 14 or 1, got 2. "
        "Copy it to the host"
    )


def test_a_device_that_does_not_exist_is_refused(queue):
    _, inputs = case_inputs(queue)
    producers = [Producer(array, device=(ONEAPI, 99)) for array in inputs]
    with pytest.raises(BufferError) as error:
        verify(*producers)
    assert str(error.value) == (
        "`draft_tokens` must be on a device of dpctl's: got DLPack's device (14, 99). "
        "`specverify-dpex doctor` lists them"
    )


def test_a_capsule_of_another_device_than_announced_is_refused(queue):
    device = arrays.usm_array(np.zeros(1, "f4"), queue).__dlpack_device__()
    text = refusal(queue, BufferError, device_type=CPU)
    assert text == f"`target_probs` must be where its `__dlpack_device__` says: expected {device}, got (1, {device[1]})"


def test_memory_that_sycl_does_not_know_is_refused(queue):
    host = np.zeros((4, 4, 257), "f4")
    text = refusal(queue, BufferError, data=host.ctypes.data)
    name = queue.sycl_device.name.strip()
    assert text == (
        f"`target_probs` must be USM memory of the default context of {name}: got {host.ctypes.data:#x}, which is not. "
        "Allocate it on the library's default queue"
    )


@pytest.mark.parametrize(
    ("code", "bits", "lanes", "shown"),
    [(2, 64, 1, "float64"), (2, 32, 4, "DLPack's 0x42002"), (10, 8, 1, "DLPack's 0x1080a")],
    ids=["float64", "vector", "float8"],
)
def test_other_types_are_refused_by_name(queue, code, bits, lanes, shown):
    text = refusal(queue, TypeError, code=code, bits=bits, lanes=lanes)
    assert text.startswith(f"`target_probs` must have dtype float32, float16 or bfloat16: got {shown}. Convert it")


def test_a_library_that_refuses_is_quoted(queue):
    class Refusing(Producer):
        def __dlpack__(self, **options: Any) -> Any:
            raise BufferError("not today")

    _, inputs = case_inputs(queue)
    with pytest.raises(BufferError) as error:
        verify(*(Refusing(array) for array in inputs))
    assert str(error.value) == "`draft_tokens` must be exported by DLPack, but its library refuses: not today"


@pytest.mark.parametrize("position", range(1, 5))
def test_mixed_devices_are_refused_by_name(queue, position):
    case, inputs = case_inputs(queue)
    producers = [Producer(array) for array in inputs]
    producers[position] = Producer(case.arrays[position])
    device = producers[0].device
    with pytest.raises(TypeError) as error:
        verify(*producers)
    assert str(error.value) == (
        f"`{NAMES[position]}` must be of the same kind as `draft_tokens`: expected test_dlpack.Producer on DLPack's "
        f"device {device}, got test_dlpack.Producer on the host. Convert one of them"
    )


# Ownership


@LAYOUTS
def test_tensors_are_given_back_once_when_nothing_uses_them(queue, layout):
    producer = Producer(arrays.usm_array(np.arange(6, dtype="f4"), queue), layout)
    read = capsule.read(producer.__dlpack__(), "array")
    gc.collect()
    assert producer.deleted == 0
    del read
    gc.collect()
    assert producer.deleted == 1


@LAYOUTS
def test_a_tensor_without_a_deleter_is_nobodys(queue, layout):
    producer = Producer(arrays.usm_array(np.arange(6, dtype="f4"), queue), layout, deleter=Deleter())
    read = capsule.read(producer.__dlpack__(), "array")
    del read
    gc.collect()
    assert producer.deleted == 0


@PLACES
def test_verify_gives_back_what_it_read(queue, place):
    case, inputs = case_inputs(queue)
    producers = [Producer(array) for array in (inputs if place == ONEAPI else case.arrays)]
    result = verify(*producers)
    gc.collect()
    assert [producer.deleted for producer in producers] == [1] * 5  # it waited: nothing is in flight
    assert_right(result, case)


def test_memory_outlives_a_producer_that_dies_early(queue):
    tensor = arrays.tensor_module()
    for versioned in (False, True):
        producer = tensor.asarray(np.arange(1000, dtype="i8"), sycl_queue=queue)
        read = capsule.read(capsule.export(producer, versioned), "array")
        del producer
        gc.collect()
        others = [tensor.full(1000, -1, dtype="i8", sycl_queue=queue) for _ in range(10)]
        seen = UsmArray((1000,), "int64", sycl_queue=queue)
        interface = {**seen.__sycl_usm_array_interface__, "data": (read.pointer, True)}
        assert tensor.asnumpy(tensor.asarray(arrays.Interface(interface, read.owner))).tolist() == list(range(1000))
        del others


def test_results_outlive_the_inputs(queue):
    case, inputs = case_inputs(queue)
    producers = [arrays.Dlpack(array) for array in inputs]
    result = verify(*producers)
    del inputs, producers
    gc.collect()
    for _ in range(10):
        arrays.usm_array(np.full((4, 4, 257), np.nan, "f4"), queue)
    assert_right(result, case)


def test_inputs_outlive_the_results(queue):
    case, inputs = case_inputs(queue)
    producers = [arrays.Dlpack(array) for array in inputs]
    for _ in range(3):
        result = verify(*producers)
        assert_right(result, case)
        del result
        gc.collect()
    for array, before in zip(inputs, case.arrays):
        np.testing.assert_array_equal(array.tolist(), before.tolist())


# Writing


def test_results_are_read_in_place_by_array_libraries(queue):
    tensor = arrays.tensor_module()
    case, inputs = case_inputs(queue)
    result = verify(*inputs)
    for array in result:
        pointer, values = array.memory._pointer + array._byte_offset, array.tolist()
        imported = tensor.from_dlpack(array)
        assert imported._pointer == pointer
        assert imported.sycl_device == queue.sycl_device
        del array
        gc.collect()
        assert tensor.asnumpy(imported).tolist() == values
    del result
    gc.collect()
    assert tensor.asnumpy(imported).tolist() == values
    assert_right(verify(*inputs), case)


@pytest.mark.parametrize("max_version", [None, (0, 8), (1, 0), (1, 3), (2, 0)])
def test_capsules_are_of_the_version_that_is_asked_for(queue, max_version):
    exported = arrays.usm_array(np.arange(6, dtype="f4"), queue).__dlpack__(max_version=max_version)
    versioned = max_version is not None and max_version >= (1, 0) and np.lib.NumpyVersion(np.__version__) >= "2.1.0"
    assert capsule_name(exported) == (b"dltensor_versioned" if versioned else b"dltensor")
    managed = (Versioned if versioned else Legacy).from_address(capsule_pointer(exported, capsule_name(exported)))
    assert (managed.tensor.device_type, managed.tensor.byte_offset) == (ONEAPI, 0)
    if versioned:
        assert (managed.major, managed.flags) == (1, 0)


@pytest.mark.parametrize("shape", [(), (0,), (2, 0, 3), (2, 3)], ids=str)
@pytest.mark.parametrize("dtype", usm_array.DTYPE_NAMES.values())
def test_every_usm_array_survives_the_round_trip(queue, shape, dtype):
    if dtype == "bool" and np.lib.NumpyVersion(np.__version__) < "1.25.0":
        pytest.skip("this numpy exports no bool")
    values = np.arange(np.prod(shape, dtype=int)).astype(dtype).reshape(shape)
    array = arrays.usm_array(values, queue)
    for options in ({}, {"max_version": (1, 0)}):
        read = capsule.read(array.__dlpack__(**options), "array")
        assert (read.shape, usm_array.DTYPE_NAMES[read.dtype], read.device) == (shape, dtype, array.__dlpack_device__())
        if values.size:
            assert read.pointer == array.memory._pointer


def test_copies_are_new_memory(queue):
    array = arrays.usm_array(np.arange(6, dtype="f4"), queue)
    read = capsule.read(array.__dlpack__(copy=True), "array")
    assert read.pointer != array.memory._pointer
    interface = {**array.__sycl_usm_array_interface__, "data": (read.pointer, True)}
    array._fill(np.zeros(6, "f4").tobytes())
    copied = arrays.tensor_module().asarray(arrays.Interface(interface, read.owner))
    assert arrays.tensor_module().asnumpy(copied).tolist() == list(range(6))


def test_the_host_gets_a_copy(queue):
    array = arrays.usm_array(np.arange(6, dtype="f4").reshape(2, 3), queue)

    class OnHost:
        def __dlpack__(self, **options: Any) -> Any:
            return array.__dlpack__(dl_device=(CPU, 0))

        def __dlpack_device__(self) -> tuple[int, int]:
            return (CPU, 0)

    host = np.from_dlpack(OnHost())
    array._fill(bytes(24))
    assert host.tolist() == [[0, 1, 2], [3, 4, 5]]
    if np.lib.NumpyVersion(np.__version__) >= "2.1.0":
        assert np.from_dlpack(array, device="cpu").tolist() == [[0, 0, 0], [0, 0, 0]]
    empty = arrays.usm_array(np.zeros((2, 0), "f4"), queue)
    assert capsule.read(empty.__dlpack__(dl_device=(CPU, 0)), "array").shape == (2, 0)


def test_devices_without_a_copy_are_refused(queue):
    array = arrays.usm_array(np.arange(6, dtype="f4"), queue)
    device = array.__dlpack_device__()
    with pytest.raises(BufferError) as error:
        array.__dlpack__(dl_device=(CUDA, 0))
    assert str(error.value) == f"`dl_device` must be {device}, or (1, 0) for the host: got (2, 0)"
    with pytest.raises(BufferError) as error:
        array.__dlpack__(dl_device=(CPU, 0), copy=False)
    assert str(error.value) == (
        "`copy` must not be False where `dl_device` is the host: the memory is on a SYCL device"
    )


def test_memory_of_a_private_context_is_not_exported(device):
    try:
        part = device.create_sub_devices(partition=[1, 1])[0]
    except dpctl.SyclSubDeviceCreationError:
        pytest.skip("the device has no parts")
    array = UsmArray((3,), "float32", sycl_queue=dpctl.SyclQueue(dpctl.SyclContext(part), part))
    with pytest.raises(BufferError, match="^`UsmArray` must be in its device's default context to be exported"):
        array.__dlpack__()


def test_a_consumers_queue_waits_for_the_results(device):
    queue = dpctl.SyclQueue(device, property="in_order")
    case, inputs = case_inputs(queue)
    tensor = arrays.tensor_module()
    other = arrays.cached_queue(device)
    for _ in range(50):
        result = verify(*inputs)  # on an in-order queue it does not wait
        read = capsule.read(result.accepted.__dlpack__(stream=other), "array")
        interface = {**result.accepted.__sycl_usm_array_interface__, "syclobj": other}
        seen = tensor.asnumpy(tensor.asarray(arrays.Interface(interface, read.owner), copy=True))
        assert seen.tolist() == reference.verify(*case.arrays).accepted.tolist()


def test_a_consumer_that_gives_up_gets_its_own_error(queue):
    array = arrays.usm_array(np.arange(6, dtype="f4"), queue)
    for _ in range(100):
        with pytest.raises((BufferError, RuntimeError), match="(?i)device"):  # numpy knows the host alone
            np.from_dlpack(arrays.Dlpack(array))


def test_imports_may_outlive_the_interpreter(device):
    code = (
        "import ctypes, specverify_dpex as s\n"
        "from specverify_dpex import capsule\n"
        "array = s.UsmArray.from_list([1, 2, 3], 'int64')\n"
        "exported = array.__dlpack__()\n"
        "read = capsule.read(array.__dlpack__(), 'array')\n"
        "ctypes.pythonapi.Py_IncRef(ctypes.py_object(read))\n"
        "ctypes.pythonapi.Py_IncRef(ctypes.py_object(array.__dlpack__()))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")


# Leaks


def peak_after(work: Any, times: int) -> int:
    resource = pytest.importorskip("resource", reason="only POSIX counts a process's memory this way")
    for _ in range(times):
        work()
    gc.collect()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def test_ten_thousand_round_trips_leak_nothing(queue):
    array = arrays.usm_array(np.arange(2000, dtype="f4"), queue)
    tensor = arrays.tensor_module()

    def round_trip() -> None:
        capsule.read(array.__dlpack__(), "array")
        capsule.read(array.__dlpack__(max_version=(1, 0)), "array")
        capsule.read(array.__dlpack__(copy=True), "array")
        array.__dlpack__()  # nobody takes this one
        tensor.from_dlpack(array)

    before = peak_after(round_trip, 1000)
    references = sys.getrefcount(array)
    assert peak_after(round_trip, 10_000) - before < 4000  # kB; the copies alone would be 80,000
    assert sys.getrefcount(array) == references


def test_ten_thousand_calls_leak_nothing(queue):
    _, inputs = case_inputs(queue)
    producers = [arrays.Dlpack(array) for array in inputs]
    before = peak_after(lambda: verify(*producers), 1000)
    references = [sys.getrefcount(array) for array in inputs]
    assert peak_after(lambda: verify(*producers), 10_000) - before < 4000
    assert [sys.getrefcount(array) for array in inputs] == references
