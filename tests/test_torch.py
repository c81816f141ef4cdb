"""torch: tensors on the CPU as they are, and the protocol of torch.xpu by a stand-in with real capsules and queues."""

from __future__ import annotations

import ctypes
import gc
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import arrays
import dpctl
import generate
import numpy as np
import pytest

from specverify_dpex import dlpack, emitted_tokens, launch, reference, runtime, verify

NAMES = ("draft_tokens", "draft_probs", "target_probs", "uniform_accept", "uniform_sample")


@pytest.fixture
def torch() -> Any:
    found = arrays.optional("torch")
    if found is None:
        pytest.skip("torch is not installed: the session `current` of noxfile.py has it, and fails without it")
    return found


@pytest.fixture
def stand_in() -> Any:
    if arrays.tensor_module() is None:
        pytest.fail("neither dpctl.tensor nor dpnp.tensor is installed: the sessions of noxfile.py have one")
    import torch_stand_in

    torch_stand_in.install()
    return torch_stand_in


def random_case(seed: int = 7, shape: tuple[int, int, int] = (4, 3, 257)) -> generate.Case:
    return generate.random_case(seed, shape=shape, dtype="float32", token_dtype="int64", with_draft_probs=True)


def assert_right(result: Any, case: generate.Case, read: Any) -> None:
    expected = reference.verify(*case.arrays)
    np.testing.assert_array_equal(read(result.accepted), expected.accepted)
    np.testing.assert_array_equal(read(result.next_token), expected.next_token)


# On the CPU


def test_cpu_tensors_come_back_as_cpu_tensors(device, torch):
    case = random_case()
    result = verify(*map(torch.from_numpy, case.arrays))
    for tensor in result:
        assert type(tensor) is torch.Tensor
        assert (tensor.device.type, tensor.dtype, tensor.shape) == ("cpu", torch.int64, (4,))
        tensor += 1  # it may be written to
        tensor -= 1
    assert_right(result, case, lambda tensor: tensor.numpy())


def test_bfloat16_is_copied_bytewise(device, torch):
    for array in (torch.arange(24.0).reshape(2, 3, 4).to(torch.bfloat16), torch.arange(6).to(torch.bfloat16)[::2]):
        kind = dlpack.kind_of(array, "array")
        copied = kind.copy(kind.view(array, "array"))
        assert (copied.dtype, copied.shape) == ("bfloat16", tuple(array.shape))
        content = bytes(copied.owner.memory.copy_to_host())[: 2 * array.numel()]
        assert content == array.contiguous().view(torch.uint8).numpy().tobytes()


def test_cpu_tensors_of_any_strides_are_read(device, torch):
    case = random_case()
    tokens, draft, target, accept, sample = map(torch.from_numpy, case.arrays)
    padded = torch.nn.functional.pad(target, (3, 5), value=1.0)[..., 3:-5]
    position_first = draft.transpose(0, 1).contiguous().transpose(0, 1)
    every_other = torch.repeat_interleave(accept, 2, dim=1)[:, ::2]
    vocabulary_first = target.permute(2, 0, 1).contiguous().permute(1, 2, 0)
    for other in (padded, vocabulary_first):
        assert_right(verify(tokens, position_first, other, every_other, sample), case, lambda tensor: tensor.numpy())


def test_parameters_and_tensors_with_gradients_are_read(device, torch):
    case = random_case()
    tokens, draft, target, accept, sample = map(torch.from_numpy, case.arrays)
    result = verify(tokens, draft.requires_grad_(), torch.nn.Parameter(target) * 1, accept, sample)
    assert not result.accepted.requires_grad
    assert_right(result, case, lambda tensor: tensor.numpy())


def test_lazily_negated_tensors_are_read_as_they_show(device, torch):
    case = random_case()
    tokens, draft, target, accept, sample = map(torch.from_numpy, case.arrays)
    lazy = torch.complex(torch.zeros_like(target), -target).conj().imag
    assert lazy.is_neg()
    assert_right(verify(tokens, draft, lazy, accept, sample), case, lambda tensor: tensor.numpy())


def test_emitted_tokens_of_torch_and_numpy_go_to_torch(device, torch):
    out = torch.zeros((2, 3), dtype=torch.int64)
    tokens = torch.tensor([[1, 2], [3, 4]])
    assert emitted_tokens(tokens, np.array([1, 2]), np.array([5, 6]), out=out) is out
    assert out.tolist() == [[1, 5, -1], [3, 4, 6]]


def test_tensors_of_other_types_are_refused(device, torch):
    tokens, draft, target, accept, sample = map(torch.from_numpy, random_case().arrays)
    with pytest.raises(TypeError) as error:
        verify(tokens, draft, target.double(), accept, sample)
    assert str(error.value) == (
        "`target_probs` must have dtype float32, float16 or bfloat16: got float64. Convert it, for example with "
        "target_probs.to(torch.float32)"
    )
    with pytest.raises(TypeError, match="^`target_probs` must have dtype .* or bfloat16: got torch.float8_e4m3fn. "):
        verify(tokens, draft, target.to(torch.float8_e4m3fn), accept, sample)


def test_sparse_tensors_are_refused(device, torch):
    tokens, draft, target, accept, sample = map(torch.from_numpy, random_case().arrays)
    with pytest.raises(BufferError) as error:
        verify(tokens, draft, target, accept.to_sparse(), sample)
    assert str(error.value) == (
        "`uniform_accept` must be a dense tensor: expected torch.strided, got torch.sparse_coo. "
        "Convert it, for example with uniform_accept.to_dense()"
    )


def test_tensors_elsewhere_are_refused(device, torch):
    text = "`target_probs` must be on a SYCL device or on the host: expected a torch device xpu or cpu, got "
    tokens, draft, target, accept, sample = map(torch.from_numpy, random_case().arrays)
    with pytest.raises(BufferError) as error:
        verify(tokens, draft, target.to("meta"), accept, sample)
    assert str(error.value) == f"{text}meta. Such a tensor has no data: create it on one of these"
    elsewhere = types.SimpleNamespace(device=torch.device("cuda", 0))
    with pytest.raises(BufferError) as error:
        dlpack._kinds[type(target)].of(elsewhere, "target_probs")
    assert str(error.value) == f"{text}cuda:0. Copy it, for example with target_probs.cpu()"


def test_numpy_and_torch_do_not_mix(device, torch):
    case = random_case()
    with pytest.raises(TypeError) as error:
        verify(torch.from_numpy(case.draft_tokens), *case.arrays[1:])
    assert str(error.value) == (
        "`target_probs` must be of the same kind as `draft_tokens`: expected torch.Tensor on cpu, got numpy.ndarray. "
        "Convert one of them"
    )


# On an XPU


def test_xpu_tensors_are_read_in_place(queue, stand_in, monkeypatch):
    seen = {}
    original = dlpack._TorchXpuKind.view
    monkeypatch.setattr(
        dlpack._TorchXpuKind, "view", lambda self, a, name: seen.setdefault(name, original(self, a, name))
    )
    case = random_case()
    inputs = [stand_in.make(array, queue) for array in case.arrays]
    assert_right(verify(*inputs), case, stand_in.read)
    for name, tensor in zip(NAMES, inputs):
        assert seen[name].pointer == tensor.data_ptr()
        assert seen[name].queue.addressof_ref() != stand_in.current[tensor.device].addressof_ref()  # a copy …
        assert seen[name].queue == stand_in.current[tensor.device]  # … of the same queue


def test_xpu_results_are_memory_that_torch_allocated(queue, stand_in):
    case = random_case()
    stand_in.allocated.clear()
    result = verify(*(stand_in.make(array, queue) for array in case.arrays))
    (whole,) = stand_in.allocated
    begin, end = whole.data_ptr(), whole.data_ptr() + whole.shape[0]
    for tensor in result:
        assert type(tensor) is stand_in.Tensor
        assert (tensor.device, str(tensor.dtype), tensor.shape) == (whole.device, "torch.int64", (4,))
        assert begin <= tensor.data_ptr() < end
    assert_right(result, case, stand_in.read)


def test_xpu_work_runs_on_the_current_stream(queue, stand_in, monkeypatch):
    case = random_case()
    inputs = [stand_in.make(array, queue) for array in case.arrays]
    device = inputs[0].device
    for _ in range(3):
        stream = dpctl.SyclQueue(queue.sycl_device, property="in_order")
        monkeypatch.setitem(stand_in.current, device, stream)
        result = verify(*inputs)
        assert stand_in.allocated[-1].array.sycl_queue == stream
        assert_right(result, case, stand_in.read)


def test_a_stream_at_the_address_of_a_dead_one_is_another(queue, stand_in, monkeypatch):
    """torch's own streams live for ever; one that a caller lends it may die, and the next one may lie where it lay."""
    kind = dlpack.kind_of(stand_in.make(np.zeros(1, "f4"), queue), "x")
    one, two = (dpctl.SyclQueue(queue.sycl_device, property="in_order") for _ in range(2))
    place = (ctypes.c_char * 16).from_buffer(bytearray(ctypes.string_at(one.addressof_ref(), 16)))
    monkeypatch.setattr(stand_in.module.xpu, "current_stream", lambda _: stand_in.Stream(ctypes.addressof(place)))
    assert kind._current_queue() == one
    place[:] = ctypes.string_at(two.addressof_ref(), 16)  # a sycl::queue is a shared pointer
    assert kind._current_queue() == two


def test_torch_keeps_its_queue(queue, stand_in, monkeypatch):
    case = random_case()
    stream = dpctl.SyclQueue(queue.sycl_device, property="in_order")
    monkeypatch.setitem(stand_in.current, stand_in.DEVICES[0], stream)
    address = stream.addressof_ref()
    owners = (ctypes.c_int32 * 2).from_address(ctypes.c_uint64.from_address(address + 8).value + 8)  # of the pointer
    inputs = [stand_in.make(array, queue) for array in case.arrays]
    kind = dlpack.kind_of(inputs[0], "draft_tokens")
    kind._queue = None
    before = owners[0]
    for _ in range(100):
        kind._queue = None  # every call takes the queue anew
        assert_right(verify(*inputs), case, stand_in.read)
    kind._queue = None
    launch.in_flight.release() if hasattr(launch, "in_flight") else launch._in_flight._release()
    gc.collect()
    assert owners[0] <= before + 8  # caches hold a few; 100 would be a leak, fewer than before a theft
    assert owners[0] >= before
    stream.wait()


def test_xpu_calls_do_not_wait(queue, stand_in, monkeypatch):
    if launch.SequentialOrderManager is None:
        pytest.skip("dpctl 0.17 waits")
    case = random_case()
    inputs = [stand_in.make(array, queue) for array in case.arrays]
    assert_right(verify(*inputs), case, stand_in.read)
    waited = []
    monkeypatch.setattr(
        launch.dpctl, "SyclEvent", type("Event", (dpctl.SyclEvent,), {"wait": lambda self: waited.append(self)})
    )
    result = verify(*inputs)
    assert not waited
    verify(*(arrays.Dlpack(tensor.array) for tensor in inputs))  # on the cached queue, which is out of order
    assert waited
    monkeypatch.undo()
    assert_right(result, case, stand_in.read)


def test_xpu_work_is_ordered_without_a_wait(queue, stand_in):
    tensor = arrays.tensor_module()
    case = random_case(shape=(4, 3, 8193))
    device = stand_in.make(np.zeros(1, "f4"), queue).device
    stream = stand_in.current[device]
    tokens, draft, target, accept, sample = (stand_in.make(array, queue) for array in case.arrays)
    one = tensor.asarray(1, dtype="f4", sycl_queue=stream)
    expected = reference.verify(*case.arrays)
    for _ in range(50):
        produced = stand_in.Tensor(tensor.multiply(target.array, one), device)  # still being written
        result = verify(tokens, draft, produced, accept, sample)
        after = tensor.add(result.accepted.array, result.next_token.array)  # reads the results
        np.testing.assert_array_equal(tensor.asnumpy(after), expected.accepted + expected.next_token)


def test_xpu_vocabularies_with_strides_are_copied(queue, stand_in):
    case = random_case()
    inputs = [stand_in.make(np.repeat(array, 2, axis=-1), queue) for array in case.arrays]
    views = [stand_in.Tensor(tensor.array[..., ::2], tensor.device) for tensor in inputs]
    assert_right(verify(*views), case, stand_in.read)


def test_xpu_and_cpu_do_not_mix(queue, stand_in):
    case = random_case()
    inputs = [stand_in.make(array, queue) for array in case.arrays]
    inputs[3].device = stand_in.Device("cpu", 0)
    with pytest.raises(TypeError) as error:
        verify(*inputs)
    assert str(error.value) == (
        f"`uniform_accept` must be of the same kind as `draft_tokens`: expected torch.Tensor on {inputs[0].device}, "
        "got torch.Tensor on cpu. Convert one of them"
    )


def test_two_xpus_do_not_mix(queue, stand_in):
    inputs = [stand_in.make(array, queue) for array in random_case().arrays]
    inputs[2].device = stand_in.Device("xpu", 7)
    with pytest.raises(TypeError) as error:
        verify(*inputs)
    assert str(error.value) == (
        f"`target_probs` must be of the same kind as `draft_tokens`: expected torch.Tensor on {inputs[0].device}, "
        "got torch.Tensor on xpu:7. Convert one of them"
    )


def fake_torch(tmp_path: Path, libsycl: str) -> Any:
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "libc10_xpu.so").write_bytes(b"\x7fELF\0" + libsycl.encode() + b"\0")
    return types.SimpleNamespace(__file__=str(tmp_path / "__init__.py"), __version__="2.9.0+xpu")


def test_a_torch_with_another_sycl_runtime_is_named(device, tmp_path):
    ours = runtime.needed_sycl(runtime.dpctl_interface(str(Path(dpctl.__file__).parent)))
    theirs = next(number for number in runtime.STACKS if number != ours)
    torch = fake_torch(tmp_path, f"libsycl.so.{theirs}")
    with pytest.raises(BufferError) as error:
        dlpack._TorchXpuKind(torch, "xpu:0", "draft_tokens")
    assert str(error.value) == (
        "`draft_tokens` must be of a torch that shares dpctl's SYCL runtime: torch 2.9.0+xpu brings "
        f"libsycl.so.{theirs}, while dpctl {dpctl.__version__} needs libsycl.so.{ours}, and memory of one is invalid "
        f"in the other. Install a matching pair: {runtime.matching((theirs, ours))}"
    )
    stacks = runtime.STACKS
    assert f"torch {stacks[ours].torch} (XPU) goes with dpctl {stacks[ours].dpctl}" in str(error.value)


def test_a_torch_with_the_same_sycl_runtime_is_fine(device, tmp_path):
    ours = runtime.needed_sycl(runtime.dpctl_interface(str(Path(dpctl.__file__).parent)))
    assert runtime.torch_mismatch(fake_torch(tmp_path, f"libsycl.so.{ours}")) is None


def test_a_torch_without_xpu_is_fine(torch):
    assert runtime.torch_mismatch(torch) is None


def test_importing_the_library_loads_no_other():
    code = (
        "import sys, specverify_dpex, specverify_dpex.verify\n"
        "print([n for n in ('torch', 'dpnp', 'dpctl.tensor', 'jax', 'numba', 'numba_dpex') if n in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert (done.stdout, done.returncode) == ("[]\n", 0), done.stderr
