"""Fixed programs of PyTorch, each with what it says to the trainer. Workers import this.

They have what the drawn programs of `tests.programs` and the idioms of `tests.torch.idioms` lack: strategies,
precisions, communication hooks of users, optimizers that PyTorch cannot watch, own loops.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.utils.data import DataLoader, TensorDataset

from raysgd.callbacks import WorkerCallback
from raysgd.torch import TrainingOperator
from raysgd.utils import BATCH_WEIGHT
from tests.programs.parts import NUM_FEATURES, classes, table
from tests.recordings import seams

NUM_SAMPLES, BATCH = 42, 8
"""The last batch has two samples: one for each of two workers."""


class Plain(TrainingOperator):
    """The stock step on a small network with normalization and dropout, in float32."""

    num_classes: ClassVar[int] = 0

    def setup(self, config: dict[str, Any]) -> None:
        seams.watch_process()
        torch.manual_seed(5)
        models = self.make_models()
        optimizers = self.make_optimizers(models)
        made = self.register(
            models=models,
            optimizers=optimizers,
            criterion=self.make_criterion(),
            schedulers=[torch.optim.lr_scheduler.ExponentialLR(optimizers[0], 0.9)],
            **self.more_parts(),
        )
        self.models, self.optimizers, self.criterion = made[0], made[1], made[2]
        self.model, self.optimizer = self.models[0], self.optimizers[0]
        seams.watch_parts(models, optimizers)
        inputs = table(1, NUM_SAMPLES, NUM_FEATURES).float()
        targets = classes(2, NUM_SAMPLES) if self.num_classes else inputs.sin().sum(1, keepdim=True)
        data = TensorDataset(inputs, self.prepared(targets))
        self.register_data(
            train_loader=self.loader(data, shuffle=True),
            validation_loader=DataLoader(TensorDataset(inputs, targets), 9),
        )

    def loader(self, data: Any, shuffle: bool) -> Any:
        return DataLoader(data, BATCH, shuffle=shuffle, collate_fn=seams.collate)

    def prepared(self, targets: torch.Tensor) -> torch.Tensor:
        return targets

    def make_models(self) -> list[nn.Module]:
        return [
            nn.Sequential(nn.Linear(NUM_FEATURES, 6), nn.Tanh(), nn.Dropout(0.2), nn.Linear(6, self.num_classes or 1))
        ]

    def make_optimizers(self, models: list[nn.Module]) -> list[Any]:
        return [torch.optim.Adam(model.parameters(), 0.02) for model in models]

    def make_criterion(self) -> Any:
        return nn.CrossEntropyLoss() if self.num_classes else nn.MSELoss()

    def more_parts(self) -> dict[str, Any]:
        return {}

    def loss_of(self, batch: Any) -> torch.Tensor:
        found: torch.Tensor = self.criterion(self.model(batch[0]), batch[1])
        return found


class Norms(Plain):
    def make_models(self) -> list[nn.Module]:
        return [nn.Sequential(nn.Linear(NUM_FEATURES, 6), nn.BatchNorm1d(6), nn.Linear(6, 1))]


class Labels(Plain):
    """Classes have weights, and some labels are ignored."""

    num_classes = 4

    def prepared(self, targets: torch.Tensor) -> torch.Tensor:
        return targets.where(torch.arange(NUM_SAMPLES) % 5 != 0, -100)

    def make_criterion(self) -> Any:
        return nn.CrossEntropyLoss(weight=torch.tensor([0.5, 1.0, 2.0, 0.25]))


class Rmse(Plain):
    """A weight of its own for each batch; in one batch of one rank it is 0 and the loss NaN."""

    def train_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
        loss, weight = self.loss_of(batch), float(len(batch[1]))
        if self.global_step == 2 and self.world_rank == 1:
            loss, weight = loss * torch.nan, 0.0
        self.backward(loss, weight=weight)
        self.optimizer_step()
        return {"train_loss": loss.detach(), BATCH_WEIGHT: weight}


class CompressesHalf(Plain):
    def more_parts(self) -> dict[str, Any]:
        return {"ddp_args": {"comm_hook": (None, bf16_compress_hook)}}


class CompressesByPower(Plain):
    def more_parts(self) -> dict[str, Any]:
        state = PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=2, min_compression_rate=0.5)
        return {"ddp_args": {"comm_hook": (state, powerSGD_hook)}}


class Gan(Plain):
    """Two models and two optimizers in a batch of its own."""

    def make_models(self) -> list[nn.Module]:
        return [
            nn.Sequential(nn.Linear(NUM_FEATURES, 5), nn.Tanh(), nn.Linear(5, 1)),
            nn.Sequential(nn.Linear(NUM_FEATURES, 5), nn.Tanh(), nn.Linear(5, NUM_FEATURES)),
        ]

    def train_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
        judge, maker = self.models
        made = maker(torch.sin(7 * batch[0]))
        first = nn.functional.softplus(-judge(batch[0])).mean() + nn.functional.softplus(judge(made.detach())).mean()
        self.backward(first, optimizer=self.optimizers[0])
        self.optimizer_step(optimizer=self.optimizers[0])
        second = nn.functional.softplus(-judge(maker(torch.sin(7 * batch[0])))).mean()
        self.backward(second, optimizer=self.optimizers[1])
        self.optimizer_step(optimizer=self.optimizers[1])
        return {"judged": first.detach(), "made": second.detach(), "num_samples": len(batch[0])}


class ByHand(Plain):
    """PyTorch's own calls, past the rungs of the library."""

    def train_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
        self.optimizer.zero_grad()
        loss = self.loss_of(batch)
        loss.backward()
        self.optimizer.step()
        return {"train_loss": loss.item(), "num_samples": len(batch[1])}


class OwnStep(Plain):
    """Looks at the gradients before it steps."""

    def optimizer_step(self, *args: Any, **kwargs: Any) -> Any:
        norm = torch.stack([each.grad.norm() for each in self.model.parameters() if each.grad is not None]).norm()
        self.norms = [*getattr(self, "norms", []), float(norm)]
        return super().optimizer_step(*args, **kwargs)


class Breaks(Plain):
    """A loop of its own that stops inside a window of accumulated batches. A buffer counts, which is handed over."""

    resumes_epochs = True

    def make_models(self) -> list[nn.Module]:
        models = super().make_models()
        models[0].register_buffer("num_batches", torch.zeros(()))
        return models

    def train_epoch(self, iterator: Iterable[Any], info: dict[str, Any] | None = None, **_: Any) -> dict[str, Any]:
        for batch in iterator:
            self.train_batch(batch, {})
            if int(next(self.model.buffers()).add_(1)) % 5 == 3:
                break
        return {"num_samples": 1}


class Closure(Plain):
    def make_optimizers(self, models: list[nn.Module]) -> list[Any]:
        return [torch.optim.LBFGS(models[0].parameters(), 0.1, max_iter=3)]

    def make_models(self) -> list[nn.Module]:
        return [nn.Linear(NUM_FEATURES, 1)]

    def train_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
        def closure() -> torch.Tensor:
            self.optimizer.zero_grad()
            loss = self.loss_of(batch)
            loss.backward()
            return loss

        return {"train_loss": float(self.optimizer.step(closure)), "num_samples": len(batch[1])}


class Unwatched:
    """An optimizer that is none of PyTorch's and has no hooks."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self.param_groups: list[dict[str, Any]] = [{"params": list(parameters), "lr": 0.05}]
        self.state: dict[Any, Any] = {}

    def zero_grad(self, set_to_none: bool = True) -> None:
        for parameter in self.param_groups[0]["params"]:
            parameter.grad = None

    def step(self, closure: Any = None) -> None:
        with torch.no_grad():
            for parameter in self.param_groups[0]["params"]:
                if parameter.grad is not None:
                    parameter -= self.param_groups[0]["lr"] * parameter.grad.sign() * 0.1

    def state_dict(self) -> dict[str, Any]:
        return {"lr": self.param_groups[0]["lr"]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.param_groups[0]["lr"] = state["lr"]


class WithoutHooks(ByHand):
    def setup(self, config: dict[str, Any]) -> None:
        seams.watch_process()
        torch.manual_seed(5)
        [model] = self.make_models()
        self.model, self.optimizer, self.criterion = self.register(
            models=model, optimizers=Unwatched(model.parameters()), criterion=self.make_criterion()
        )
        seams.watch_parts([model], [])
        inputs = table(1, NUM_SAMPLES, NUM_FEATURES).float()
        data = TensorDataset(inputs, inputs.sin().sum(1, keepdim=True))
        self.register_data(train_loader=self.loader(data, shuffle=True), validation_loader=DataLoader(data, 9))


class Teacher(Norms):
    """A model that is not wrapped, in training mode: its running means differ between ranks unless they are sent."""

    def setup(self, config: dict[str, Any]) -> None:
        self.teacher = nn.Sequential(nn.Linear(NUM_FEATURES, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
        super().setup(config)

    def make_models(self) -> list[nn.Module]:
        torch.manual_seed(6)
        teacher = nn.Sequential(nn.Linear(NUM_FEATURES, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)).requires_grad_(False)
        return [*super().make_models(), teacher]

    def make_optimizers(self, models: list[nn.Module]) -> list[Any]:
        return [torch.optim.Adam(models[0].parameters(), 0.02)]

    def train_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
        loss = self.loss_of(batch) + (self.model(batch[0]) - self.models[1](batch[0])).pow(2).mean()
        self.backward(loss)
        self.optimizer_step()
        return {"train_loss": loss.detach(), "num_samples": len(batch[1])}


class Unfreezes(Plain):
    """The first layer is frozen until the second call."""

    def make_models(self) -> list[nn.Module]:
        models = super().make_models()
        models[0][0].requires_grad_(False)  # type: ignore[index]
        return models


class Stepping(WorkerCallback):
    """Notes what steps show to callbacks, and reads their metrics."""

    def on_step_end(self, operator: Any, step: Any, metrics: Any) -> dict[str, float]:
        seams.note(f"on_step_end {step}")
        return {"largest": max(float(each.abs().max()) for each in operator.model.parameters())}


def unfreeze(operator: Any) -> None:
    """Let the first layer train, too."""
    operator._raysgd.registered.original_models[0][0].requires_grad_(True)
    operator.rewrap()


def step_between(operator: Any) -> None:
    """Step with a gradient that no call has made."""
    operator.optimizer.zero_grad()
    generator = torch.Generator().manual_seed(9)
    for parameter in operator.model.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator)
    operator.optimizer.step()


@dataclass(frozen=True)
class Program:
    """A program.

    Attributes:
        operator: Its operator.
        options: What the trainer is told beside it.
        kill: Rank and step of a worker that dies in the second call; none dies where it is None.
        between: What all operators do before the second call.
        callbacks: With them, `fit` makes the calls.
        has_order: Whether its events come in a certain order. Those of futures of PyTorch do not.
    """

    operator: type[TrainingOperator]
    options: dict[str, Any] = field(default_factory=dict)
    kill: tuple[int, int] | None = None
    between: Callable[[Any], None] | None = None
    callbacks: tuple[Any, ...] = ()
    has_order: bool = True


_WHOLE: dict[str, Any] = {"split_batches": True, "seed": 3, "use_gpu": False}
_TWO = {**_WHOLE, "accumulate_grad_batches": 2}
_PARTS = {**_WHOLE, "micro_batch_size": 2}
_FSDP = {"seed": 3, "use_gpu": False, "strategy": "fsdp", "strategy_options": {"min_block_parameters": 1}}
_HOROVOD = {"seed": 3, "use_gpu": False, "backend": "horovod"}

PROGRAMS: dict[str, Program] = {
    "plain": Program(Plain, _WHOLE),
    "plain-killed": Program(Plain, _WHOLE, (1, 7)),
    "loader-of-each": Program(Plain, {"seed": 3, "use_gpu": False}),
    "not-divided": Program(Plain, {"seed": 3, "use_gpu": False, "add_dist_sampler": False}),
    "norms": Program(Norms, _WHOLE),
    "labels": Program(Labels, _WHOLE),
    "labels-parts": Program(Labels, _PARTS, (1, 7)),
    "labels-accumulated": Program(Labels, _TWO),
    "weight-0": Program(Rmse, _WHOLE),
    "accumulated": Program(Plain, _TWO),
    "accumulated-killed": Program(Plain, _TWO, (0, 4)),
    "parts": Program(Plain, {**_PARTS, "clip_grad_norm": 0.1}),
    "parts-killed": Program(Plain, _PARTS, (1, 8)),
    "bf16": Program(Plain, {**_WHOLE, "precision": "bf16"}),
    "fp16": Program(Plain, {**_WHOLE, "use_fp16": True}),
    "fp16-gan-killed": Program(Gan, {**_WHOLE, "use_fp16": True}, (1, 7)),
    "gan": Program(Gan, _WHOLE),
    "gan-killed": Program(Gan, _WHOLE, (1, 7)),
    "gan-accumulates": Program(Gan, _TWO),
    "hook-bf16": Program(CompressesHalf, _WHOLE),
    "hook-power": Program(CompressesByPower, {"seed": 3, "use_gpu": False}, has_order=False),
    "none": Program(Plain, {"seed": 3, "use_gpu": False, "strategy": "none"}),
    "none-accumulated": Program(Plain, {"seed": 3, "use_gpu": False, "strategy": "none", "accumulate_grad_batches": 2}),
    "deterministic": Program(Plain, {**_WHOLE, "deterministic": True}),
    "deterministic-killed": Program(Plain, {**_WHOLE, "deterministic": True}, (1, 7)),
    "deterministic-norms-parts": Program(Plain, {**_PARTS, "deterministic": True}),
    "by-hand": Program(ByHand, _WHOLE),
    "by-hand-killed": Program(ByHand, _WHOLE, (1, 8)),
    "own-step": Program(OwnStep, _WHOLE),
    "breaks": Program(Breaks, {**_WHOLE, "accumulate_grad_batches": 2}),
    "breaks-killed": Program(Breaks, {**_WHOLE, "accumulate_grad_batches": 2}, (1, 1)),
    "closure": Program(Closure, {"seed": 3, "use_gpu": False, "strategy": "none"}),
    "without-hooks": Program(WithoutHooks, _WHOLE),
    "without-hooks-killed": Program(WithoutHooks, _WHOLE, (1, 7)),
    "teacher": Program(Teacher, _WHOLE),
    "unfreezes": Program(Unfreezes, _WHOLE, between=unfreeze),
    "steps-between": Program(ByHand, _WHOLE, between=step_between),
    "callbacks": Program(Plain, _TWO, callbacks=(Stepping(),)),
    "fsdp": Program(Plain, _FSDP),
    "fsdp-accumulated": Program(Plain, {**_FSDP, "accumulate_grad_batches": 2}),
    "fsdp-labels": Program(Labels, _FSDP),
    "horovod": Program(Plain, _HOROVOD),
    "horovod-accumulated": Program(Plain, {**_HOROVOD, "accumulate_grad_batches": 2}),
    "horovod-labels": Program(Labels, _HOROVOD),
}
