"""What the benchmark times: the library, the floor, and the routes that array libraries offer.

The eager routes are what one writes without a kernel: gather, ratio, cumulative product, residual,
renormalise, draw. They come in two forms: *eager* is the usual whole-batch one, with the residual and a draw
at every position, of which one per sequence is kept; *lean* is the best we could make of the library,
touching only the row where each walk stopped and drawing by the inverse of the cumulative sum. They read
uniforms that are given, as verify() does; `torch.multinomial` takes none, so torch-eager draws with torch's
own generator.
"""

from __future__ import annotations

import importlib
import statistics
import time
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any, Callable, ClassVar, TypeVar

import dpctl
import numpy as np
from workloads import Array, Inputs

from specverify_dpex import UsmArray, VerifyResult, launch, verify
from specverify_dpex.launch import SequentialOrderManager

Setting = TypeVar("Setting")


class Engine:
    """One way to verify a workload.

    `prepare` comes first, then any number of `run`; `results` and `mismatch` look at the last one.
    """

    name: ClassVar[str]
    needs: ClassVar[str | None] = None
    """The module that it cannot do without."""
    setting = ""
    """What it runs with, where it has a choice: every engine is timed with its fastest."""
    inputs: Inputs

    def prepare(self, inputs: Inputs) -> None:
        """Put everything in place that a decoding loop would have there before the call.

        Raises
        ------
        ImportError
            If the engine needs a module that is not there.
        """
        self.inputs = inputs
        if self.needs is not None:
            importlib.import_module(self.needs)

    def run(self) -> None:
        """Verify once; both outputs are complete when it returns."""
        raise NotImplementedError

    def results(self) -> VerifyResult:
        """The outputs of the last run, as numpy arrays."""
        raise NotImplementedError

    def mismatch(self) -> str | None:
        """How the last run differs from the reference, bit for bit; None where it does not."""
        for field, got, expected in zip(VerifyResult._fields, self.results(), self.inputs.expected):
            if not np.array_equal(got, expected):
                return _difference(field, got, expected)
        return None

    @property
    def device(self) -> str:
        return describe(self.inputs.queue.sycl_device)


class Specverify(Engine):
    """The library: one plain call on arrays that are on the device, waiting for its results."""

    name = "specverify"

    def prepare(self, inputs):
        super().prepare(inputs)
        self._arrays = inputs.on_device
        self.setting = type(self._arrays.target_probs).__module__.split(".")[0] + " arrays"

    def run(self):
        self._result = verify(*self._arrays)
        wait(self.inputs.queue)

    def results(self):
        return VerifyResult(*map(_to_numpy, self._result))


class Floor(Engine):
    """The kernel of floor.py: it reads the rows that verification must read and adds them up in float32."""

    name = "floor"
    entry_point = "floor_f32"
    arguments = (
        ("draft_probs", "float32*"),
        ("target_probs", "float32*"),
        ("stops", "int64*"),
        ("num_draft", "int64"),
        ("vocab", "int64"),
        ("slice_length", "int64"),
        ("sums", "float32*"),
    )
    tolerance = 1e-4
    """Of a row's sum: a work-item adds some thousand numbers of one sign, each time rounding to 2**-24."""

    def prepare(self, inputs):
        super().prepare(inputs)
        self._kernel = self._load(inputs.queue)
        stops = inputs.expected.accepted * 2 + ~inputs.rejected
        self._stops = UsmArray.from_list(stops.tolist(), "int64", sycl_queue=inputs.queue)
        self._rows: tuple[Any, ...] = (inputs.on_device.draft_probs, inputs.on_device.target_probs)
        vocab = inputs.workload.vocab
        work_groups = [size for size in (8, 16, 64, 256) if size <= self._kernel.max_work_group]
        slices = [1, *(count for count in (2, 4, 8, 16, 32, 64) if count * 1024 <= vocab)]
        cuts = [(size, count) for size in work_groups for count in slices]
        work_group, count = fastest(cuts, self._run_cut)
        self._cut(work_group, count)
        self.setting = f"work-groups of {work_group}, {count} slice{'s' if count > 1 else ''}"

    def _load(self, queue: dpctl.SyclQueue) -> launch.Kernel:
        module = Path(__file__).with_name(f"{self.entry_point}.spv").read_bytes()
        arguments = [{"name": name, "type": type_} for name, type_ in self.arguments]
        return launch.Kernel(queue, self.entry_point, module, arguments)

    def _cut(self, work_group: int, slices: int) -> None:
        batch, num_draft, vocab = self.inputs.workload
        self._sums = UsmArray((batch, slices, work_group), "float32", sycl_queue=self.inputs.queue)
        draft_probs, target_probs = self._rows
        arguments = {
            "draft_probs": _address(draft_probs),
            "target_probs": _address(target_probs),
            "stops": _address(self._stops),
            "num_draft": num_draft,
            "vocab": vocab,
            "slice_length": -(-vocab // slices),
            "sums": _address(self._sums),
        }
        self._launch = launch.Launch(self._kernel, self.inputs.queue, arguments, (batch, slices), work_group)

    def _run_cut(self, cut: tuple[int, int]) -> None:
        self._cut(*cut)
        self.run()

    def run(self):
        self._launch.submit(()).wait()

    def mismatch(self):
        sequence, position = np.arange(self.inputs.workload.batch), self.inputs.expected.accepted
        expected = self.inputs.target_probs[sequence, position].sum(axis=1, dtype=np.float64)
        rejected = np.flatnonzero(self.inputs.rejected)
        draft_rows = self.inputs.draft_probs[rejected, position[rejected]]
        expected[rejected] += draft_rows.sum(axis=1, dtype=np.float64)
        got = _to_numpy(self._sums).sum(axis=(1, 2), dtype=np.float64)
        near = np.isclose(got, expected, rtol=self.tolerance, atol=0)
        return None if near.all() else _difference("sums", np.where(near, expected, got), expected)


class Eager(Engine):
    """A route through an array library.

    Its draw is not the reference's, so what is checked is that the accepted lengths are the reference's and
    that each token has weight in the row that it must come from.
    """

    def verify(
        self, draft_tokens: Any, draft_probs: Any, target_probs: Any, uniform_accept: Any, uniform_sample: Any
    ) -> tuple[Any, Any]:
        """The route; returns the accepted lengths and the tokens that follow."""
        raise NotImplementedError

    def mismatch(self):
        accepted, next_token = self.results()
        if not np.array_equal(accepted, self.inputs.expected.accepted):
            return _difference("accepted", accepted, self.inputs.expected.accepted)
        unsupported = np.flatnonzero(~self.inputs.supports(next_token))
        if len(unsupported):
            return f"next_token[{unsupported[0]}] is {next_token[unsupported[0]]}, which has no weight there"
        return None


class _Torch(Eager):
    """torch on the host's CPU, with the number of threads that suits it best."""

    needs = "torch"

    def prepare(self, inputs):
        super().prepare(inputs)
        import torch

        self._torch = torch
        self._arrays = [torch.from_numpy(array) for array in inputs.on_host]
        self._threads = _torch_threads()
        if self._threads > 1:  # on busy cores, threads that wait for one another can be slower than one
            self._threads = fastest([1, self._threads], self._run_with)
        self.setting = f"{self._threads} thread{'s' if self._threads > 1 else ''}"

    def _run_with(self, threads: int) -> None:
        self._threads = threads
        self.run()

    def run(self):
        if self._torch.get_num_threads() != self._threads:
            self._torch.set_num_threads(self._threads)
        with self._torch.inference_mode():
            self._result = self.verify(*self._arrays)

    def results(self):
        return VerifyResult(*(output.numpy() for output in self._result))

    @property
    def device(self) -> str:
        return "host CPU"

    def accepted(self, draft_tokens, draft_probs, target_probs, uniform_accept):
        token = draft_tokens.unsqueeze(2)
        draft = draft_probs.gather(2, token).squeeze(2)
        target = target_probs[:, :-1].gather(2, token).squeeze(2)
        accepts = uniform_accept < (target / draft).clamp(max=1)
        return accepts.long().cumprod(dim=1).sum(dim=1)


class TorchEager(_Torch):
    """torch on the CPU: the residual of every position and `torch.multinomial`."""

    name = "torch-eager"

    def verify(self, draft_tokens, draft_probs, target_probs, uniform_accept, uniform_sample):
        torch = self._torch
        accepted = self.accepted(draft_tokens, draft_probs, target_probs, uniform_accept)
        residual = (target_probs[:, :-1] - draft_probs).clamp(min=0)
        weights = torch.cat([residual, target_probs[:, -1:]], dim=1)
        weights /= weights.sum(dim=2, keepdim=True)
        tokens = torch.multinomial(weights.flatten(0, 1), num_samples=1).view(weights.shape[:2])
        return accepted, tokens.gather(1, accepted.unsqueeze(1)).squeeze(1)


class TorchLean(_Torch):
    """torch on the CPU: only the rows where the walks stopped, and a search in their cumulative sums."""

    name = "torch-lean"

    def verify(self, draft_tokens, draft_probs, target_probs, uniform_accept, uniform_sample):
        torch = self._torch
        accepted = self.accepted(draft_tokens, draft_probs, target_probs, uniform_accept)
        batch, num_draft = draft_tokens.shape
        sequence = torch.arange(batch)
        weights = target_probs[sequence, accepted]
        rejected = (accepted < num_draft).nonzero().squeeze(1)
        weights[rejected] -= draft_probs[rejected, accepted[rejected]]
        running = weights.clamp_(min=0).cumsum(dim=1)
        threshold = uniform_sample[sequence, accepted].unsqueeze(1) * running[:, -1:]
        return accepted, torch.searchsorted(running, threshold, right=True).squeeze(1)


class _Dpnp(Eager):
    """dpnp on the library's device."""

    needs = "dpnp"

    def prepare(self, inputs):
        super().prepare(inputs)
        import dpnp

        self._dpnp = dpnp
        self._arrays = inputs.on_device

    def run(self):
        self._result = self.verify(*self._arrays)
        wait(self.inputs.queue)

    def results(self):
        return VerifyResult(*map(_to_numpy, self._result))

    def accepted(self, draft_tokens, draft_probs, target_probs, uniform_accept):
        dpnp = self._dpnp
        token = draft_tokens[:, :, None]
        draft = dpnp.take_along_axis(draft_probs, token, axis=2)[:, :, 0]
        target = dpnp.take_along_axis(target_probs[:, :-1], token, axis=2)[:, :, 0]
        accepts = uniform_accept < dpnp.minimum(target / draft, 1)
        return dpnp.cumprod(accepts, axis=1, dtype="i8").sum(axis=1)


class DpnpEager(_Dpnp):
    """dpnp: the residual of every position, and the first token beyond a uniform in the cumulative sum."""

    name = "dpnp-eager"

    def verify(self, draft_tokens, draft_probs, target_probs, uniform_accept, uniform_sample):
        dpnp = self._dpnp
        accepted = self.accepted(draft_tokens, draft_probs, target_probs, uniform_accept)
        residual = dpnp.maximum(target_probs[:, :-1] - draft_probs, 0)
        weights = dpnp.concatenate([residual, target_probs[:, -1:]], axis=1)
        weights /= weights.sum(axis=2, keepdims=True)
        running = dpnp.cumsum(weights, axis=2)
        # Scaled by the last sum, which rounding left near 1: beyond it there would be no token to find.
        tokens = dpnp.argmax(running > uniform_sample[:, :, None] * running[:, :, -1:], axis=2)
        return accepted, dpnp.take_along_axis(tokens, accepted[:, None], axis=1)[:, 0]


class DpnpLean(_Dpnp):
    """dpnp: only the rows where the walks stopped."""

    name = "dpnp-lean"

    def verify(self, draft_tokens, draft_probs, target_probs, uniform_accept, uniform_sample):
        dpnp = self._dpnp
        accepted = self.accepted(draft_tokens, draft_probs, target_probs, uniform_accept)
        batch, num_draft = draft_tokens.shape
        sequence = dpnp.arange(batch, sycl_queue=accepted.sycl_queue)
        draft = draft_probs[sequence, dpnp.minimum(accepted, num_draft - 1)] * (accepted < num_draft)[:, None]
        running = dpnp.cumsum(dpnp.maximum(target_probs[sequence, accepted] - draft, 0), axis=1)
        threshold = uniform_sample[sequence, accepted][:, None] * running[:, -1:]
        return accepted, dpnp.argmax(running > threshold, axis=1)


ENGINES: dict[str, type[Engine]] = {
    engine.name: engine for engine in (Specverify, Floor, TorchEager, TorchLean, DpnpEager, DpnpLean)
}


def fastest(settings: Iterable[Setting], run: Callable[[Setting], None], rounds: int = 7) -> Setting:
    """The setting with the least median time, each tried in turn after a run that does not count."""
    times: dict[Setting, list[int]] = {setting: [] for setting in settings}
    for setting in times:
        run(setting)
    for _ in range(rounds):
        for setting, taken in times.items():
            start = time.perf_counter_ns()
            run(setting)
            taken.append(time.perf_counter_ns() - start)
    return min(times, key=lambda setting: statistics.median(times[setting]))


def wait(queue: dpctl.SyclQueue) -> None:
    """Wait for what the array libraries have on a queue, as they do before they copy a result to the host."""
    if SequentialOrderManager is None:
        queue.wait()
    else:
        SequentialOrderManager[queue].wait()


def describe(device: dpctl.SyclDevice) -> str:
    return (
        f"{device.name.strip()}, {device.backend.name} {device.device_type.name}, "
        f"{device.max_compute_units} compute units, driver {device.driver_version}"
    )


@cache
def _torch_threads() -> int:
    """What torch takes by itself, asked before anything here changes it."""
    import torch

    return torch.get_num_threads()


def _to_numpy(array: Any) -> Array:
    return np.asarray(array.tolist()) if isinstance(array, UsmArray) else array.asnumpy()


def _address(array: Any) -> int:
    interface = array.__sycl_usm_array_interface__
    return interface["data"][0] + interface.get("offset", 0) * np.dtype(interface["typestr"]).itemsize


def _difference(field: str, got: Array, expected: Array) -> str:
    if got.shape != expected.shape:
        return f"{field} has shape {got.shape}, expected {expected.shape}"
    sequence = int(np.flatnonzero(got != expected)[0])
    return f"{field}[{sequence}] is {got[sequence]}, expected {expected[sequence]}"
