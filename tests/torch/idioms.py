"""The idioms of training loops, each as an operator that dies where it is told to.

On several workers each ends as in one process, or an error says what to write; `tests.torch.idiom_table` looks at that.
Whatever an idiom draws or adds up depends on no division of its samples, so that the numbers can be compared.
"""

from __future__ import annotations

import json
import math
import os
import signal
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from raysgd.torch import TrainingOperator

NUM_STEPS, JOINT_BATCH, NUM_FEATURES, NUM_CLASSES = 20, 13, 4, 3
SECOND = 5
"""The batch in which something unusual happens."""
Batch = Sequence[torch.Tensor]


class Idiom(TrainingOperator):
    """The stock step; `config["idiom"]` names the subclass that is made.

    Attributes:
        words: The name in the table.
        refused: What an error says to write; empty where several workers equal one process.
        unseen: Whether the page names it as an exception that no check sees.
        global_batch: The samples of a batch of all workers.
    """

    words: ClassVar[str] = "stock step"
    refused: ClassVar[str] = ""
    unseen: ClassVar[bool] = False
    global_batch: ClassVar[int] = JOINT_BATCH

    def __new__(cls, config: dict[str, Any], **_: Any) -> Idiom:
        made: Idiom = super().__new__(IDIOMS[config["idiom"]])
        return made

    def setup(self, config: dict[str, Any]) -> None:
        self.take(self.make_model(), self.make_optimizer, self.make_criterion())

    def make_model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(NUM_FEATURES, 5), nn.Tanh(), nn.Linear(5, 1))

    def make_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.Adam([each for each in model.parameters() if each.requires_grad], 0.02)

    def make_criterion(self) -> Any:
        return nn.MSELoss()

    def rows(self) -> tuple[torch.Tensor, ...]:
        """Return features and targets of all samples."""
        features = self.random(NUM_STEPS * self.global_batch, NUM_FEATURES, seed=1)
        return features, features.sin().sum(1, keepdim=True)

    def random(self, *shape: int, seed: int) -> torch.Tensor:
        """Return numbers that are the same on all workers."""
        generator = torch.Generator().manual_seed(seed)
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(self.dtype)

    @property
    def dtype(self) -> torch.dtype:
        found: torch.dtype = getattr(torch, self.config["dtype"])
        return found

    def take(
        self, model: nn.Module, make_optimizer: Callable[[nn.Module], Any], criterion: Any = None, **others: Any
    ) -> None:
        """Register a model and its optimizer, and the data."""
        made = self.take_all([model], [make_optimizer], criterion, **others)
        [self.model], [self.optimizer], self.criterion = made

    def take_all(
        self, models: list[nn.Module], make_optimizers: list[Callable[[Any], Any]], criterion: Any = None, **others: Any
    ) -> tuple[list[Any], list[Any], Any]:
        """Register models and optimizers, the last of which is made of the last model, and the data."""
        models = [model.to(self.dtype) for model in models]
        makers = zip([models[0]] * (len(make_optimizers) - len(models)) + models, make_optimizers, strict=True)
        criterion = criterion or nn.MSELoss()
        optimizers = [make(model) for model, make in makers]
        self.step_counts: Counter[str] = Counter()
        made = self.register(models=models, optimizers=optimizers, criterion=criterion, **others)
        for model in self._raysgd.registered.original_models:
            model.register_forward_pre_hook(self._at("before forward"))
            model.register_forward_hook(self._at("before backward"))
            for parameter in [each for each in model.parameters() if each.requires_grad][-1:]:
                parameter.register_hook(self._at("in backward"))
        for optimizer in self._raysgd.registered.optimizers:
            optimizer.register_step_pre_hook(self._at("before step"))
            optimizer.register_step_post_hook(self._at("after step"))
        self.register_data(train_loader=DataLoader(TensorDataset(*self.rows()), self.global_batch, shuffle=True))
        return list(made[0]), list(made[1]), made[2]

    def _at(self, place: str) -> Callable[..., None]:
        return lambda *_: self.at(place)

    def at(self, place: str) -> None:
        """Die here if a file in the folder names this batch, place, time in the batch, and rank; once."""
        self.step_counts[f"{self.global_step} {place}"] += 1
        number = self.step_counts[f"{self.global_step} {place}"]
        death = Path(self.config["folder"], "death")
        if death.exists() and json.loads(death.read_text()) == [self.global_step, place, number, self.world_rank]:
            death.unlink()
            os.kill(os.getpid(), signal.SIGKILL)


class Own(Idiom):
    """A step by hand: `step_on` is `train_batch`."""

    words = "own `train_batch`"

    def train_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
        self.step_on(batch)
        self.at("end")
        return {}

    def step_on(self, batch: Batch) -> None:
        self.optimizer.zero_grad()
        self.loss(batch).backward()
        self.optimizer.step()

    def loss(self, batch: Batch) -> torch.Tensor:
        found: torch.Tensor = self.criterion(self.model(batch[0]), batch[1])
        return found

    @property
    def weights(self) -> list[nn.Parameter]:
        return [each for each in self.model.parameters() if each.requires_grad]


def noise_of(real: torch.Tensor) -> torch.Tensor:
    """Return noise that does not depend on how samples are divided."""
    return torch.sin(7 * real)


# ------------------------------------------------------------------------------------------ two networks


class Gan(Own):
    words = "GAN"

    def setup(self, config: dict[str, Any]) -> None:
        torch.manual_seed(0)
        judge = nn.Sequential(self.layer(), nn.Tanh(), nn.Linear(5, 1))
        maker = nn.Sequential(nn.Linear(NUM_FEATURES, 5), nn.Tanh(), nn.Linear(5, NUM_FEATURES))
        made = self.take_all([judge, maker], [self.make_optimizer, self.make_optimizer])
        (self.judge, self.maker), (self.of_judge, self.of_maker), self.criterion = made
        self.model = self.judge

    def layer(self) -> nn.Module:
        return nn.Linear(NUM_FEATURES, 5)

    def step_on(self, batch: Batch) -> None:
        self.train_judge(batch[0])
        self.train_maker(batch[0])

    def train_judge(self, real: torch.Tensor) -> None:
        made = self.maker(noise_of(real)).detach()
        self.of_judge.zero_grad()
        (F.softplus(-self.judge(real)).mean() + F.softplus(self.judge(made)).mean()).backward()
        self.of_judge.step()

    def train_maker(self, real: torch.Tensor) -> None:
        self.of_maker.zero_grad()
        F.softplus(-self.judge(self.maker(noise_of(real)))).mean().backward()
        self.of_maker.step()


class GanSecondBatch(Gan):
    words = "GAN whose generator steps in each second batch"

    def step_on(self, batch: Batch) -> None:
        self.train_judge(batch[0])
        if self.global_step % 2:
            self.train_maker(batch[0])


class GanAccumulates(Gan):
    words = "GAN whose generator steps with the gradients of two batches"

    def step_on(self, batch: Batch) -> None:
        self.train_judge(batch[0])
        (F.softplus(-self.judge(self.maker(noise_of(batch[0])))).mean() / 2).backward()
        if self.global_step % 2:
            self.of_maker.step()
            self.of_maker.zero_grad()


class WganPenalty(Gan):
    words = "WGAN-GP"

    def train_judge(self, real: torch.Tensor) -> None:
        for _ in range(2):
            made = self.maker(noise_of(real)).detach()
            between = (0.3 * real + 0.7 * made).requires_grad_()
            (slopes,) = torch.autograd.grad(self.judge(between).sum(), between, create_graph=True)
            penalty = (slopes.norm(dim=1) - 1).square().mean()
            self.of_judge.zero_grad()
            (self.judge(made).mean() - self.judge(real).mean() + 10 * penalty).backward()
            self.of_judge.step()

    def train_maker(self, real: torch.Tensor) -> None:
        self.of_maker.zero_grad()
        (-self.judge(self.maker(noise_of(real))).mean()).backward()
        self.of_maker.step()


class WganClips(WganPenalty):
    words = "WGAN that clips weights"

    def train_judge(self, real: torch.Tensor) -> None:
        self.of_judge.zero_grad()
        (self.judge(self.maker(noise_of(real)).detach()).mean() - self.judge(real).mean()).backward()
        self.of_judge.step()
        with torch.no_grad():
            for weight in self.judge.parameters():
                weight.clamp_(-0.3, 0.3)


class GanSpectral(Gan):
    words = "GAN with spectral norm"

    def layer(self) -> nn.Module:
        return nn.utils.parametrizations.spectral_norm(nn.Linear(NUM_FEATURES, 5))


# ------------------------------------------------------------------------------------------ sharpness-aware steps


class Sam(Own):
    """Goes up along the gradient and takes that of there; a subclass says how it goes up and comes back."""

    words = "SAM, `add_`"

    def step_on(self, batch: Batch) -> None:
        self.optimizer.zero_grad()
        self.loss(batch).backward()
        back = self.climb([0.1 * weight.grad for weight in self.weights if weight.grad is not None])
        self.optimizer.zero_grad()
        self.loss(batch).backward()
        back()
        self.optimizer.step()

    def climb(self, uphill: list[torch.Tensor]) -> Callable[[], object]:
        def move(sign: int) -> None:
            with torch.no_grad():
                for weight, by in zip(self.weights, uphill, strict=True):
                    weight.add_(by, alpha=sign)

        move(1)
        return partial(move, -1)


class SamData(Sam):
    words = "SAM, `data.add_`"

    def climb(self, uphill: list[torch.Tensor]) -> Callable[[], object]:
        for weight, by in zip(self.weights, uphill, strict=True):
            weight.data.add_(by)
        return lambda: [weight.data.sub_(by) for weight, by in zip(self.weights, uphill, strict=True)]


class SamSwaps(Sam):
    words = "SAM, swaps `data`"

    def climb(self, uphill: list[torch.Tensor]) -> Callable[[], object]:
        before = [weight.data for weight in self.weights]
        for weight, by in zip(self.weights, uphill, strict=True):
            weight.data = weight.data + by
        return lambda: [setattr(weight, "data", data) for weight, data in zip(self.weights, before, strict=True)]


class SamVector(Sam):
    words = "SAM, as a vector"

    def climb(self, uphill: list[torch.Tensor]) -> Callable[[], object]:
        before = nn.utils.parameters_to_vector(self.weights).detach()
        nn.utils.vector_to_parameters(before + nn.utils.parameters_to_vector(uphill), self.weights)
        return lambda: nn.utils.vector_to_parameters(before, self.weights)


class SamNumPy(Sam):
    words = "SAM, in NumPy"

    def climb(self, uphill: list[torch.Tensor]) -> Callable[[], object]:
        arrays = [weight.detach().numpy() for weight in self.weights]
        before = [array.copy() for array in arrays]
        for array, by in zip(arrays, uphill, strict=True):
            array += by.numpy()
        return lambda: [array.__setitem__(..., old) for array, old in zip(arrays, before, strict=True)]


# ------------------------------------------------------------------------------------------ optimizers and schedulers


class Overlapping(Own):
    words = "two optimizers with a parameter in both"

    def setup(self, config: dict[str, Any]) -> None:
        torch.manual_seed(0)
        first = partial(torch.optim.SGD, lr=0.05)
        makers = [self.make_optimizer, lambda model: first(model[0].parameters())]
        [self.model], (self.optimizer, self.of_first), self.criterion = self.take_all([self.make_model()], makers)

    def step_on(self, batch: Batch) -> None:
        super().step_on(batch)
        self.of_first.zero_grad()
        (self.loss(batch) * 0.5).backward()
        self.of_first.step()


class OverlappingOnce(Overlapping):
    words = "the same, with one backward pass"

    def step_on(self, batch: Batch) -> None:
        Own.step_on(self, batch)
        self.of_first.step()


class Accumulating(Own):
    words = "accumulation by hand"

    def step_on(self, batch: Batch) -> None:
        (self.loss(batch) / 2).backward()
        if self.global_step % 2:
            self.optimizer.step()
            self.optimizer.zero_grad()


class AccumulatingUnsynced(Own):
    words = "accumulation by hand, with `no_sync`"

    def step_on(self, batch: Batch) -> None:
        is_last = self.global_step % 2 == 1
        with nullcontext() if is_last or self.world_size == 1 else self.model.no_sync():
            (self.loss(batch) / 2).backward()
        if is_last:
            self.optimizer.step()
            self.optimizer.zero_grad()


class Scheduled(Own):
    words = "scheduler by hand, in each batch"

    def setup(self, config: dict[str, Any]) -> None:
        torch.manual_seed(0)
        model = self.make_model().to(self.dtype)
        optimizer = self.make_optimizer(model)
        self.scheduler = self.make_scheduler(optimizer)
        self.take(model, lambda _: optimizer, schedulers=self.scheduler)

    def make_scheduler(self, optimizer: Any) -> Any:
        return torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=NUM_STEPS + 1)

    def step_on(self, batch: Batch) -> None:
        super().step_on(batch)
        self.scheduler.step()


class ScheduledFirst(Scheduled):
    words = "scheduler by hand, before the backward pass"

    def step_on(self, batch: Batch) -> None:
        if self.global_step:
            self.scheduler.step()
        Own.step_on(self, batch)


class OwnRate(Own):
    words = "learning rate by hand, before the backward pass"

    def step_on(self, batch: Batch) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] *= 0.9
        super().step_on(batch)


class ScheduledByLoss(Scheduled):
    words = "`ReduceLROnPlateau` by hand, by this worker's loss"
    refused = "random numbers or learning rates that differ between workers"

    def make_scheduler(self, optimizer: Any) -> Any:
        return torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5)

    def step_on(self, batch: Batch) -> None:
        Own.step_on(self, batch)
        self.scheduler.step(self.loss(batch).item())


class TwoLosses(Own):
    words = "two backward passes before a step"

    def step_on(self, batch: Batch) -> None:
        self.optimizer.zero_grad()
        self.loss(batch).backward()
        (0.1 * self.model(batch[0]).square().mean()).backward()
        self.optimizer.step()


class TwoLossesOfOne(Own):
    words = "two backward passes of one forward pass"
    refused = "a second `loss.backward()` after the forward passes"

    def step_on(self, batch: Batch) -> None:
        self.optimizer.zero_grad()
        output = self.model(batch[0])
        self.criterion(output, batch[1]).backward(retain_graph=True)
        (0.1 * output.square().mean()).backward()
        self.optimizer.step()


class TwoLossesByMethod(Own):
    words = "two `self.backward` before a step"

    def step_on(self, batch: Batch) -> None:
        self.backward(self.loss(batch))
        self.backward(0.1 * self.model(batch[0]).square().mean())
        self.optimizer_step()


class TwoSteps(Own):
    words = "two steps in a batch"

    def step_on(self, batch: Batch) -> None:
        super().step_on(batch)
        super().step_on(batch)


class Clipping(Own):
    words = "clipping by hand, before the step"

    def step_on(self, batch: Batch) -> None:
        self.optimizer.zero_grad()
        self.loss(batch).backward()
        nn.utils.clip_grad_norm_(self.weights, 0.1)
        self.optimizer.step()


class Decaying(Own):
    words = "weight decay by hand, after the step"

    def step_on(self, batch: Batch) -> None:
        super().step_on(batch)
        for weight in self.weights:
            weight.data.mul_(0.99)


class DecayingFirst(Own):
    words = "weight decay by hand, before the backward pass"

    def step_on(self, batch: Batch) -> None:
        for weight in self.weights:
            weight.data.mul_(0.99)
        super().step_on(batch)


class Metric(Own):
    words = "a metric reduced by hand, after the step"

    def step_on(self, batch: Batch) -> None:
        super().step_on(batch)
        if self.world_size > 1:
            dist.all_reduce(torch.ones(1))


# ------------------------------------------------------------------------------------------ losses over labels


class Labels(Idiom):
    words = "stock step, `ignore_index`"

    def make_model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(NUM_FEATURES, 5), nn.Tanh(), nn.Linear(5, NUM_CLASSES))

    def make_criterion(self) -> Any:
        return nn.CrossEntropyLoss(ignore_index=0)

    def rows(self) -> tuple[torch.Tensor, ...]:
        features, _ = super().rows()
        return features, (features[:, :NUM_CLASSES] ** 2).argmax(1)


class ClassWeights(Labels):
    words = "stock step, class weights"

    def make_criterion(self) -> Any:
        return nn.CrossEntropyLoss(weight=torch.tensor([0.1, 1.0, 3.0], dtype=self.dtype))


class OwnLabels(Own, Labels):
    words = "`ignore_index`, `self.backward(loss)`"

    def step_on(self, batch: Batch) -> None:
        self.backward(self.loss(batch))
        self.optimizer_step()


class OwnClassWeights(OwnLabels, ClassWeights):
    words = "class weights, `self.backward(loss)`"


class PlainLabels(OwnLabels):
    words = "`ignore_index`, `loss.backward()`"
    refused = r"self\.backward\(loss, weight="
    step_on = Own.step_on


class PlainClassWeights(PlainLabels, ClassWeights):
    words = "class weights, `loss.backward()`"


class FunctionalLabels(PlainLabels):
    words = "`ignore_index`, `functional.cross_entropy`"
    refused = ""
    unseen = True

    def loss(self, batch: Batch) -> torch.Tensor:
        return F.cross_entropy(self.model(batch[0]), batch[1], ignore_index=0)


class _OwnLoss(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, features: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        output = self.inner(features)
        return {"logits": output, "loss": F.cross_entropy(output, labels, ignore_index=0)}


class ModelLoss(Labels):
    """As models of Hugging Face do."""

    words = "stock step, `ignore_index` in the model"
    unseen = True

    def setup(self, config: dict[str, Any]) -> None:
        super().setup(config)
        del self.criterion

    def make_model(self) -> nn.Module:
        return _OwnLoss(super().make_model())

    def forward(self, features: Any, target: Any) -> Any:
        return self.model(*features, target)["loss"]


class PenalizedLabels(OwnLabels):
    words = "`ignore_index` and a penalty"
    refused = PlainLabels.refused

    def loss(self, batch: Batch) -> torch.Tensor:
        return super().loss(batch) + 0.01 * sum(each.square().sum() for each in self.weights)


class CountedLabels(OwnLabels):
    words = "`ignore_index` and a penalty, `weight=`"

    def step_on(self, batch: Batch) -> None:
        loss = self.loss(batch) + 0.01 * sum(each.square().sum() for each in self.weights)
        self.backward(loss, weight=(batch[1] != 0).sum())
        self.optimizer_step()


# ------------------------------------------------------------------------------------------ state beside the weights


class Spectral(Idiom):
    words = "stock step, spectral norm"

    def make_model(self) -> nn.Module:
        model = super().make_model()
        assert isinstance(model, nn.Sequential)
        nn.utils.parametrizations.spectral_norm(model[0])
        return model


class OldSpectral(Own):
    words = "own `train_batch`, the older spectral norm"

    def make_model(self) -> nn.Module:
        model = super().make_model()
        assert isinstance(model, nn.Sequential)
        nn.utils.spectral_norm(model[0])
        return model


class _Followed(nn.Module):
    """A network, and one that follows it."""

    def __init__(self, in_forward: bool) -> None:
        super().__init__()
        self.online, self.target = (nn.Linear(NUM_FEATURES, 1) for _ in range(2))
        self.target.requires_grad_(False)
        self.in_forward = in_forward

    def follow(self) -> None:
        for slow, fast in zip(self.target.parameters(), self.online.parameters(), strict=True):
            slow.data.lerp_(fast.data, 0.2)

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        if self.in_forward:
            self.follow()
        output: torch.Tensor = self.online(features) + 0.3 * self.target(features)
        return output


class Momentum(Idiom):
    words = "stock step, momentum encoder"

    def make_model(self) -> nn.Module:
        return _Followed(in_forward=True)


class OwnMomentum(Own):
    words = "momentum encoder, after the step"

    def make_model(self) -> nn.Module:
        return _Followed(in_forward=False)

    @property
    def both(self) -> Any:
        return getattr(self.model, "module", self.model)

    def step_on(self, batch: Batch) -> None:
        super().step_on(batch)
        self.both.follow()


class MomentumFirst(OwnMomentum):
    words = "momentum encoder, before the forward pass"

    def step_on(self, batch: Batch) -> None:
        self.both.follow()
        Own.step_on(self, batch)


class _Codes(nn.Module):
    """Replaces what a layer makes by the nearest code, and moves the codes to what they stand for."""

    def __init__(self, sums_up: bool) -> None:
        super().__init__()
        self.before, self.behind = nn.Linear(NUM_FEATURES, 2), nn.Linear(2, 1)
        self.register_buffer("codes", torch.tensor([[1.0, 1.0], [-1.0, 1.0], [1.0, -1.0], [-1.0, -1.0]]))
        self.sums_up = sums_up

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        made = self.before(features)
        which = torch.cdist(made.detach(), self.codes).argmin(1)
        if self.training:
            member = F.one_hot(which, len(self.codes)).to(made.dtype)
            sums = torch.cat((member.sum(0, keepdim=True).T, member.T @ made.detach()), 1)
            if self.sums_up and dist.is_initialized():
                dist.all_reduce(sums)
            means = sums[:, 1:] / sums[:, :1].clamp(min=1)
            self.codes = torch.where(sums[:, :1] > 0, 0.9 * self.codes + 0.1 * means, self.codes)
        output: torch.Tensor = self.behind(made + (self.codes[which] - made).detach())
        return output


class Codes(Idiom):
    words = "VQ code book, `dist.all_reduce`"

    def make_model(self) -> nn.Module:
        return _Codes(sums_up=True)


class LocalCodes(Idiom):
    words = "VQ code book, each worker's samples"
    unseen = True

    def make_model(self) -> nn.Module:
        return _Codes(sums_up=False)


class _Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head = nn.LSTMCell(NUM_FEATURES, 3), nn.Linear(3, 1)

    def forward(self, features: torch.Tensor, hidden: Any) -> tuple[torch.Tensor, Any]:
        hidden = self.cell(features, hidden)
        return self.head(hidden[0]), hidden


class Recurrent(Own):
    """The state of all samples is in `state_dict`; each worker uses and returns its own part of it."""

    words = "LSTM state between batches, in `state_dict`"
    global_batch = 12

    def setup(self, config: dict[str, Any]) -> None:
        super().setup(config)
        self.hidden = torch.zeros(2, self.global_batch, 3, dtype=self.dtype)

    def make_model(self) -> nn.Module:
        return _Recurrent()

    def step_on(self, batch: Batch) -> None:
        size = len(batch[0])
        own = self.hidden[:, self.world_rank * size : (self.world_rank + 1) * size]
        output, hidden = self.model(batch[0], tuple(own))
        self.optimizer.zero_grad()
        self.criterion(output, batch[1]).backward()
        self.optimizer.step()
        parts = [torch.stack(hidden).detach()] * self.world_size
        if self.world_size > 1:
            parts = [torch.empty_like(part) for part in parts]
            dist.all_gather(parts, torch.stack(hidden).detach())
        self.hidden = torch.cat(parts, 1)

    def state_dict(self) -> dict[str, Any]:
        return {"hidden": self.hidden}

    def load_state_dict(self, state_dict: Any) -> None:
        self.hidden = state_dict["hidden"]


class RecurrentAttribute(Recurrent):
    words = "LSTM state between batches, in an attribute"
    refused = "doesn't match hidden0 batch size"

    def setup(self, config: dict[str, Any]) -> None:
        super().setup(config)
        self.own: Any = None

    def step_on(self, batch: Batch) -> None:
        output, hidden = self.model(batch[0], self.own)
        self.optimizer.zero_grad()
        self.criterion(output, batch[1]).backward()
        self.optimizer.step()
        self.own = tuple(each.detach() for each in hidden)

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state_dict: Any) -> None: ...


# ------------------------------------------------------------------------------------------ gradients


class ScalingHook(Own):
    words = "hook that scales a gradient"

    def setup(self, config: dict[str, Any]) -> None:
        super().setup(config)
        for weight in self.weights:
            self.hook(weight)

    def hook(self, weight: nn.Parameter) -> None:
        weight.register_hook(lambda gradient: 0.5 * gradient)


class ClippingHook(ScalingHook):
    words = "hook that clips a gradient"
    unseen = True

    def hook(self, weight: nn.Parameter) -> None:
        weight.register_hook(lambda gradient: gradient.clamp(-0.05, 0.05))


class LateHook(ScalingHook):
    words = "hook that clips an accumulated gradient"
    unseen = True

    def hook(self, weight: nn.Parameter) -> None:
        def clip(each: torch.Tensor) -> None:
            assert each.grad is not None
            each.grad.clamp_(-0.05, 0.05)

        weight.register_post_accumulate_grad_hook(clip)


class StepHook(Own):
    words = "hook that clips before the step"

    def setup(self, config: dict[str, Any]) -> None:
        super().setup(config)
        self.optimizer.register_step_pre_hook(lambda *_: nn.utils.clip_grad_value_(self.weights, 0.05))


_PAST = r"`self\.model\(\.\.\.\)`, and `self\.backward\(loss\)`"


class Unwrapped(Own):
    words = "`model.module(x)`"
    refused = _PAST

    def loss(self, batch: Batch) -> torch.Tensor:
        found: torch.Tensor = self.criterion(getattr(self.model, "module", self.model)(batch[0]), batch[1])
        return found


class AutogradGrad(Own):
    words = "`autograd.grad`"
    refused = _PAST

    def step_on(self, batch: Batch) -> None:
        gradients = torch.autograd.grad(self.loss(batch), self.weights)
        for weight, gradient in zip(self.weights, gradients, strict=True):
            weight.grad = gradient
        self.optimizer.step()


class AutogradAveraged(Own):
    words = "`autograd.grad`, averaged by hand"
    global_batch = 12

    def step_on(self, batch: Batch) -> None:
        gradients = torch.autograd.grad(self.loss(batch), self.weights)
        for weight, gradient in zip(self.weights, gradients, strict=True):
            if self.world_size > 1:
                dist.all_reduce(gradient)
            weight.grad = gradient / self.world_size
        self.optimizer.step()


class Functional(Own):
    words = "`torch.func`"
    refused = _PAST

    def step_on(self, batch: Batch) -> None:
        model = getattr(self.model, "module", self.model)

        def loss(weights: dict[str, torch.Tensor]) -> torch.Tensor:
            return F.mse_loss(torch.func.functional_call(model, weights, (batch[0],)), batch[1])

        gradients = torch.func.grad(loss)({name: each.detach() for name, each in model.named_parameters()})
        for name, weight in model.named_parameters():
            weight.grad = gradients[name]
        self.optimizer.step()


class Langevin(Own):
    words = "Langevin noise"
    refused = "random numbers or learning rates that differ between workers"

    def step_on(self, batch: Batch) -> None:
        super().step_on(batch)
        with torch.no_grad():
            for weight in self.weights:
                weight.add_(torch.randn_like(weight), alpha=0.01)


class SeededLangevin(Own):
    words = "Langevin noise, seeded by `global_step`"

    def step_on(self, batch: Batch) -> None:
        super().step_on(batch)
        with torch.no_grad():
            for number, weight in enumerate(self.weights):
                weight.add_(self.random(*weight.shape, seed=100 * self.global_step + number), alpha=0.01)


class Nan(Own):
    """One sample of one batch has no number."""

    words = "skips where this worker's loss is NaN"
    refused = "Let the branches of your code follow from what is equal on all workers"

    def step_on(self, batch: Batch) -> None:
        loss = self.loss(batch)
        if loss.isnan():
            return
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()

    def rows(self) -> tuple[torch.Tensor, ...]:
        features, target = super().rows()
        target[77] = math.nan
        return features, target


class NanGradient(Nan):
    words = "skips where the mean gradient is NaN"
    refused = ""

    def step_on(self, batch: Batch) -> None:
        self.optimizer.zero_grad()
        self.loss(batch).backward()
        if all(each.grad.isfinite().all() for each in self.weights if each.grad is not None):
            self.optimizer.step()


class NanStock(Nan):
    words = "`skip_batch` where the mean loss is NaN"
    refused = ""

    def step_on(self, batch: Batch) -> None:
        loss = self.loss(batch)
        mean = loss.detach().clone()
        if self.world_size > 1:
            dist.all_reduce(mean)
        if mean.isnan():
            self.skip_batch()
            return
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()


class Thawing(Own):
    words = "unfreezes a layer, without `rewrap`"
    refused = r"self\.rewrap\(\)"

    def setup(self, config: dict[str, Any]) -> None:
        torch.manual_seed(0)
        model = self.make_model()
        assert isinstance(model, nn.Sequential)
        model[0].requires_grad_(False)
        self.take(model, lambda model: torch.optim.Adam(model.parameters(), 0.02))

    def step_on(self, batch: Batch) -> None:
        if self.global_step == SECOND:
            getattr(self.model, "module", self.model)[0].requires_grad_(True)
        super().step_on(batch)


def _idioms(parent: type[Idiom]) -> Iterator[type[Idiom]]:
    yield parent
    for child in parent.__subclasses__():
        yield from _idioms(child)


IDIOMS: dict[str, type[Idiom]] = {each.__name__: each for each in _idioms(Idiom)}
