"""What the benchmark times: the library, the floor, and the routes that others offer.

The eager routes are what one writes without a kernel: gather, ratio, cumulative product, residual, renormalise, draw.
They come in two forms: *eager* is the usual whole-batch one, with the residual and a draw at every position, of which
one per sequence is kept; *lean* is the best we could make of the library, touching only the row where each walk stopped
and drawing by the inverse of the cumulative sum. They read uniforms that are given, as verify() does;
`torch.multinomial` takes none, so torch-eager and transformers draw with torch's own generator.
"""

from __future__ import annotations

import contextlib
import importlib
import statistics
import sys
import time
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Any, Callable, ClassVar, TypeVar

import dpctl
import numpy as np
from workloads import DISTINCT, Array, Inputs, Workload

import specverify_dpex
from specverify_dpex import UsmArray, VerifyResult, launch, verify
from specverify_dpex.launch import SequentialOrderManager

Setting = TypeVar("Setting")
HOST = "host CPU"


class Engine:
    """One way to verify a workload.

    Where `unavailable` has nothing to say, `prepare` comes first, then any number of `run`, with any of `settings`;
    `results` and `mismatch` look at the last one.
    """

    name: ClassVar[str]
    needs: ClassVar[str | None] = None
    """The module that it cannot do without."""
    on_host: ClassVar[bool] = False
    """Whether it reads the arrays on the host."""
    makes_targets: ClassVar[int] = 0
    """How many arrays of the size of `target_probs` it makes at once."""
    makes_rows: ClassVar[int] = 0
    """How many arrays of a row for each sequence it makes at once."""
    setting = ""
    """What it runs with."""
    inputs: Inputs

    def unavailable(self, workload: Workload) -> str | None:
        """Why this machine or this engine cannot run the workload; None if it can."""
        if self.needs is not None:
            try:
                importlib.import_module(self.needs)
            except ImportError as error:
                return f"{self.needs} cannot be imported: {error}"
        return None

    def memory(self, workload: Workload) -> int:
        """About how many bytes a run takes with its inputs, of which the device has one copy and the host the rows
        that are distinct, or all."""
        whole = self.on_host or workload.batch <= DISTINCT
        on_host = workload.input_bytes * (1 if whole else DISTINCT / workload.batch)
        made = self.makes_targets * workload.target_bytes + self.makes_rows * 4 * workload.batch * workload.vocab
        return int(workload.input_bytes + on_host + made)

    def prepare(self, inputs: Inputs) -> None:
        """Put everything in place that a decoding loop would have there before the call."""
        self.inputs = inputs

    def settings(self) -> list[Any]:
        """What to time it with, where it has a choice: the fastest counts."""
        return [None]

    def use(self, setting: Any) -> None:
        """Run with one of `settings` from now on."""

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

    def device(self, queue: dpctl.SyclQueue) -> str:
        """Where it runs, `queue` being the benchmark's."""
        return describe(queue.sycl_device)


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


class SpecverifyPrepared(Specverify):
    """The library, prepared for the arrays: one call of what `prepare` returned, waiting for its results."""

    name = "specverify-prepared"

    def unavailable(self, workload):
        if not hasattr(specverify_dpex, "prepare"):
            return f"specverify_dpex {specverify_dpex.__version__} has no `prepare`"
        return super().unavailable(workload)

    def prepare(self, inputs):
        super().prepare(inputs)
        self._prepared = specverify_dpex.prepare(*self._arrays)

    def run(self):
        self._result = self._prepared()
        wait(self.inputs.queue)


class SpecverifyKernel(SpecverifyPrepared):
    """The library's kernel alone: the launch of such a call, submitted and awaited as the floor's is."""

    name = "specverify-kernel"

    def run(self):
        self._result = self._prepared.result
        self._prepared._launch.submit((), 0).wait()


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
        self._launches: dict[tuple[int, int], tuple[launch.Launch, UsmArray]] = {}
        vocab = inputs.workload.vocab
        work_groups = [size for size in (8, 16, 64, 256) if size <= self._kernel.max_work_group]
        slices = [1, *(count for count in (2, 4, 8, 16, 32, 64) if count * 1024 <= vocab)]
        self._cuts = [(size, count) for size in work_groups for count in slices]
        self.use(self._cuts[0])

    def settings(self):
        def run(cut):
            self.use(cut)
            self.run()

        # Several, since a floor that is not the lowest flatters all that stand on it.
        return fastest(self._cuts, run)[:3]

    def use(self, setting):
        if setting not in self._launches:
            self._launches[setting] = self._cut(*setting)
        self._launch, self._sums = self._launches[setting]
        work_group, slices = setting
        self.setting = f"work-groups of {work_group}, {slices} slice{'s' if slices > 1 else ''}"

    def _load(self, queue: dpctl.SyclQueue) -> launch.Kernel:
        module = Path(__file__).with_name(f"{self.entry_point}.spv").read_bytes()
        arguments = [{"name": name, "type": type_} for name, type_ in self.arguments]
        return launch.Kernel(queue, self.entry_point, module, arguments)

    def _cut(self, work_group: int, slices: int) -> tuple[launch.Launch, UsmArray]:
        batch, num_draft, vocab, _ = self.inputs.workload
        sums = UsmArray((batch, slices, work_group), "float32", sycl_queue=self.inputs.queue)
        draft_probs, target_probs = self._rows
        arguments = {
            "draft_probs": _address(draft_probs),
            "target_probs": _address(target_probs),
            "stops": _address(self._stops),
            "num_draft": num_draft,
            "vocab": vocab,
            "slice_length": -(-vocab // slices),
            "sums": _address(sums),
        }
        return launch.Launch(self._kernel, self.inputs.queue, arguments, (batch, slices), work_group), sums

    def run(self):
        self._launch.submit(()).wait()

    def mismatch(self):
        rows = self.inputs.stop_rows()
        expected = sum(row.sum(axis=1, dtype=np.float64) for row in rows)[self.inputs.rows]
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


class _ArrayLibrary(Eager):
    """What numpy and dpnp have in common: the names of their functions."""

    xp: Any

    def accepted(self, draft_tokens: Any, draft_probs: Any, target_probs: Any, uniform_accept: Any) -> Any:
        xp = self.xp
        token = draft_tokens[:, :, None]
        draft = xp.take_along_axis(draft_probs, token, axis=2)[:, :, 0]
        target = xp.take_along_axis(target_probs[:, :-1], token, axis=2)[:, :, 0]
        accepts = uniform_accept < xp.minimum(target / draft, 1)
        return xp.cumprod(accepts, axis=1, dtype="i8").sum(axis=1)

    def arange(self, stop: int) -> Any:
        return self.xp.arange(stop)


class _EagerRoute(_ArrayLibrary):
    """The residual of every position, and the first token beyond a uniform in the cumulative sum."""

    makes_targets = 4

    def verify(self, draft_tokens, draft_probs, target_probs, uniform_accept, uniform_sample):
        xp = self.xp
        accepted = self.accepted(draft_tokens, draft_probs, target_probs, uniform_accept)
        residual = xp.maximum(target_probs[:, :-1] - draft_probs, 0)
        weights = xp.concatenate([residual, target_probs[:, -1:]], axis=1)
        weights /= weights.sum(axis=2, keepdims=True)
        running = xp.cumsum(weights, axis=2)
        # Scaled by the last sum, which rounding left near 1: beyond it there would be no token to find.
        tokens = xp.argmax(running > uniform_sample[:, :, None] * running[:, :, -1:], axis=2)
        return accepted, xp.take_along_axis(tokens, accepted[:, None], axis=1)[:, 0]


class _LeanRoute(_ArrayLibrary):
    """Only the rows where the walks stopped."""

    makes_rows = 4

    def verify(self, draft_tokens, draft_probs, target_probs, uniform_accept, uniform_sample):
        xp = self.xp
        accepted = self.accepted(draft_tokens, draft_probs, target_probs, uniform_accept)
        batch, num_draft = draft_tokens.shape
        sequence = self.arange(batch)
        draft = draft_probs[sequence, xp.minimum(accepted, num_draft - 1)] * (accepted < num_draft)[:, None]
        running = xp.cumsum(xp.maximum(target_probs[sequence, accepted] - draft, 0), axis=1)
        threshold = uniform_sample[sequence, accepted][:, None] * running[:, -1:]
        return accepted, xp.argmax(running > threshold, axis=1)


class _Numpy(_ArrayLibrary):
    """numpy on the host's CPU."""

    on_host = True
    xp = np

    def run(self):
        self._result = VerifyResult(*self.verify(*self.inputs.on_host))

    def results(self):
        return self._result

    def device(self, queue):
        return HOST


class NumpyEager(_EagerRoute, _Numpy):
    name = "numpy-eager"


class NumpyLean(_LeanRoute, _Numpy):
    name = "numpy-lean"


class _Dpnp(_ArrayLibrary):
    """dpnp on the library's device."""

    needs = "dpnp"

    def prepare(self, inputs):
        super().prepare(inputs)
        self.xp = importlib.import_module("dpnp")
        self._arrays = inputs.on_device

    def arange(self, stop):
        return self.xp.arange(stop, sycl_queue=self.inputs.queue)

    def run(self):
        self._result = self.verify(*self._arrays)
        wait(self.inputs.queue)

    def results(self):
        return VerifyResult(*map(_to_numpy, self._result))


class DpnpEager(_EagerRoute, _Dpnp):
    name = "dpnp-eager"


class DpnpLean(_LeanRoute, _Dpnp):
    name = "dpnp-lean"


class _Torch(Eager):
    """torch on the host's CPU, with the number of threads that suits it best."""

    needs = "torch"
    on_host = True

    def prepare(self, inputs):
        super().prepare(inputs)
        self._torch = importlib.import_module("torch")
        self._arrays = [self._torch.from_numpy(array) for array in inputs.on_host]
        self.use(self.settings()[0])

    def settings(self):
        return sorted({1, _torch_threads()})  # on busy cores, threads that wait for one another can be slower than one

    def use(self, setting):
        self.setting = f"{setting} thread{'s' if setting > 1 else ''}"
        self._torch.set_num_threads(setting)

    def run(self):
        with self._torch.inference_mode():
            self._result = self.verify(*self._arrays)

    def results(self):
        return VerifyResult(*(output.cpu().numpy() for output in self._result))

    def device(self, queue):
        return HOST


class _TorchEagerRoute(_Torch):
    """The residual of every position and `torch.multinomial`."""

    makes_targets = 3

    def verify(self, draft_tokens, draft_probs, target_probs, uniform_accept, uniform_sample):
        torch = self._torch
        accepted = _torch_accepted(draft_tokens, draft_probs, target_probs, uniform_accept)
        residual = (target_probs[:, :-1] - draft_probs).clamp(min=0)
        weights = torch.cat([residual, target_probs[:, -1:]], dim=1)
        weights /= weights.sum(dim=2, keepdim=True)
        tokens = torch.multinomial(weights.flatten(0, 1), num_samples=1).view(weights.shape[:2])
        return accepted, tokens.gather(1, accepted.unsqueeze(1)).squeeze(1)


class _TorchLeanRoute(_Torch):
    """Only the rows where the walks stopped, and a search in their cumulative sums."""

    makes_rows = 4

    def verify(self, draft_tokens, draft_probs, target_probs, uniform_accept, uniform_sample):
        torch = self._torch
        accepted = _torch_accepted(draft_tokens, draft_probs, target_probs, uniform_accept)
        batch, num_draft = draft_tokens.shape
        sequence = torch.arange(batch, device=accepted.device)
        weights = target_probs[sequence, accepted]
        rejected = (accepted < num_draft).nonzero().squeeze(1)
        weights[rejected] -= draft_probs[rejected, accepted[rejected]]
        running = weights.clamp_(min=0).cumsum(dim=1)
        threshold = uniform_sample[sequence, accepted].unsqueeze(1) * running[:, -1:]
        return accepted, torch.searchsorted(running, threshold, right=True).squeeze(1)


def _torch_accepted(draft_tokens: Any, draft_probs: Any, target_probs: Any, uniform_accept: Any) -> Any:
    token = draft_tokens.unsqueeze(2)
    draft = draft_probs.gather(2, token).squeeze(2)
    target = target_probs[:, :-1].gather(2, token).squeeze(2)
    accepts = uniform_accept < (target / draft).clamp(max=1)
    return accepts.long().cumprod(dim=1).sum(dim=1)


class TorchEager(_TorchEagerRoute):
    name = "torch-eager"


class TorchLean(_TorchLeanRoute):
    name = "torch-lean"


class Transformers(_Torch):
    """transformers' `_speculative_sampling`, called as `generate(do_sample=True, assistant_model=...)` calls it.

    It takes logits and begins with their softmax, which verify() leaves to its callers. Its uniforms for acceptance are
    drawn inside, by `torch.rand_like`; here that hands out the workload's, so that its accepted length can be checked.
    """

    name = "transformers"
    needs = "transformers.generation.utils"
    makes_targets = 4

    def unavailable(self, workload):
        if workload.batch != 1:
            return "it verifies one sequence at a time"
        reason = super().unavailable(workload)
        if reason is None and not hasattr(importlib.import_module(self.needs), "_speculative_sampling"):
            return f"{self.needs} has no `_speculative_sampling`"
        return reason

    def prepare(self, inputs):
        torch = importlib.import_module("torch")
        tokens, draft_probs, target_probs, uniform_accept, _ = map(torch.from_numpy, inputs.on_host)
        prompt = torch.zeros((1, 16), dtype=torch.int64)
        self._sample = importlib.import_module(self.needs)._speculative_sampling
        self._arguments = {
            "candidate_input_ids": torch.cat([prompt, tokens], dim=1),
            "candidate_logits": draft_probs.log(),
            "candidate_length": tokens.shape[1],
            "new_logits": target_probs.log(),
            "assistant_ensemble_weight": None,
        }
        self._uniforms = uniform_accept[0]
        super().prepare(inputs)

    def verify(self, draft_tokens, draft_probs, target_probs, uniform_accept, uniform_sample):
        with _replaced(self._torch, "rand_like", lambda like: self._uniforms):
            tokens, accepted = self._sample(**self._arguments)
        return accepted.unsqueeze(0), tokens[:, -1]


@contextlib.contextmanager
def _replaced(module: Any, name: str, value: Any) -> Iterator[None]:
    original = getattr(module, name)
    setattr(module, name, value)
    try:
        yield
    finally:
        setattr(module, name, original)


class _TorchXpu(_Torch):
    """torch on an Intel GPU."""

    def unavailable(self, workload):
        reason = super().unavailable(workload)
        if reason is None:
            torch = importlib.import_module("torch")
            if not (hasattr(torch, "xpu") and torch.xpu.is_available()):
                return f"torch {torch.__version__} finds no Intel GPU: torch.xpu.is_available() is False"
        return reason

    def memory(self, workload):
        return super().memory(workload) + workload.input_bytes  # torch's own copy on the device

    def prepare(self, inputs):
        Engine.prepare(self, inputs)
        self._torch = importlib.import_module("torch")
        self._arrays = [self._torch.from_numpy(array).to("xpu") for array in inputs.on_host]

    def settings(self):
        return [None]

    def use(self, setting):
        pass

    def run(self):
        with self._torch.inference_mode():
            self._result = self.verify(*self._arrays)
        self._torch.xpu.synchronize()

    def device(self, queue):
        torch = sys.modules.get("torch")
        return torch.xpu.get_device_name() if torch is not None and torch.xpu.is_available() else "Intel GPU"


class TorchXpuEager(_TorchXpu, _TorchEagerRoute):
    name = "torch-xpu-eager"


class TorchXpuLean(_TorchXpu, _TorchLeanRoute):
    name = "torch-xpu-lean"


ENGINES: dict[str, type[Engine]] = {
    engine.name: engine
    for engine in (
        Specverify,
        SpecverifyPrepared,
        SpecverifyKernel,
        Floor,
        TorchEager,
        TorchLean,
        DpnpEager,
        DpnpLean,
        NumpyEager,
        NumpyLean,
        Transformers,
        TorchXpuEager,
        TorchXpuLean,
    )
}
LIBRARY = ("specverify", "specverify-prepared", "specverify-kernel")
"""The engines that are this library: a plain call, and what is left of it when its parts are left out."""


def fastest(
    settings: Iterable[Setting], run: Callable[[Setting], None], rounds: int = 7, seconds: float = 0.5
) -> list[Setting]:
    """The settings by their median time, each tried in turn after a run that does not count.

    There are fewer rounds, but one, where they would take more than `seconds`.
    """
    times: dict[Setting, list[int]] = {setting: [] for setting in settings}
    for setting in times:
        run(setting)
    end = time.perf_counter() + seconds
    for _ in range(rounds):
        for setting, taken in times.items():
            start = time.perf_counter_ns()
            run(setting)
            taken.append(time.perf_counter_ns() - start)
        if time.perf_counter() > end:
            break
    return sorted(times, key=lambda setting: statistics.median(times[setting]))


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
