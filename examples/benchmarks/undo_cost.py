"""What a step takes that could be undone after a loss: undisturbed steps with `Recovery(undo=...)` off, "auto" and on.

    python examples/benchmarks/undo_cost.py [--smoke-test] [--repetitions 25]

The workers of one trainer switch between the three from call to call: processes that do the same differ by more than
what is measured. What undoing costs is what a step takes longer than in the call without it beside that, in seconds of
the workers' processors, which other programs of the machine disturb least. What the workers book for copies is only a
part of it, but measured more exactly. It is also counted before how many batches "auto" took a copy.
Functions with `elastic=True` copy before each batch, or, for the comparison, before none of a pass.
"""

from __future__ import annotations

import functools
import tempfile
import time
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
from _common import OWN, Report, Target, choose_peers, dispatch, estimate, make_parser, ray_cluster, run_job
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from raysgd import TorchTrainer, TrainingOperator
from raysgd.engine.shared.time_spent import UNDO as SPENT_ON_COPIES
from raysgd.operators import GANOperator
from raysgd.torch.step.undo_log import UndoLog
from raysgd.train import Trainer, world_size
from raysgd.train import torch as helpers
from raysgd.train._torch.accelerator import accelerator_of

NUM_STEPS, SMOKE_NUM_STEPS = 240, 10
NUM_FEATURES, NOISE_DIM, BATCH_SIZE = 8, 32, 32
OFF, AUTO, ON = "off", "auto", "on"
UNDO: dict[str, Any] = {OFF: False, AUTO: "auto", ON: True}
FIGURES = ("us", "booked_us", "copied")
MOST_US, MOST_SHARE = 60.0, 0.02


class Stock(TrainingOperator):
    """A small network with a batch norm, and one step in a batch."""

    def setup(self, config: dict[str, Any]) -> None:
        torch.manual_seed(0)
        norm = nn.BatchNorm1d(16)
        model = nn.Sequential(nn.Linear(NUM_FEATURES, 16), norm, nn.ReLU(), nn.Linear(16, 1))
        self.model, self.optimizer, self.criterion = self.register(
            models=model, optimizers=torch.optim.Adam(model.parameters()), criterion=nn.MSELoss()
        )
        x = torch.randn(2 * BATCH_SIZE * config["num_steps"], NUM_FEATURES)
        self.register_data(train_loader=DataLoader(TensorDataset(x, x[:, :1]), batch_size=BATCH_SIZE))

    def loss(self, batch: Any) -> torch.Tensor:
        """Leaves gradients."""
        self.optimizer.zero_grad()
        loss: torch.Tensor = self.criterion(self.model(batch[0]), batch[1])
        loss.backward()
        return loss

    def climb_and_step(self, batch: Any) -> torch.Tensor:
        """Takes a sharpness-aware step."""
        loss, parameters = self.loss(batch), list(self.model.parameters())
        with torch.no_grad():
            uphill = [0.1 * parameter.grad for parameter in parameters]
            torch._foreach_add_(parameters, uphill)
        self.loss(batch)
        with torch.no_grad():
            torch._foreach_sub_(parameters, uphill)
        self.optimizer.step()
        return loss


class SharpnessAware(Stock):
    """Its `train_batch` has two backward passes."""

    def train_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
        return {"loss": self.climb_and_step(batch).detach()}


class OwnLoop(Stock):
    """The same in another `train_epoch`."""

    resumes_epochs = True

    def train_epoch(self, iterator: Iterable[Any], info: Any = None) -> dict[str, Any]:
        loss = torch.zeros(())
        for batch in iterator:
            loss = self.climb_and_step(batch)
        return {"loss": loss.item()}


class SmallGAN(GANOperator):
    """Two small networks."""

    def build_generator(self, config: dict[str, Any]) -> nn.Module:
        return nn.Sequential(nn.Linear(NOISE_DIM, 16), nn.ReLU(), nn.Linear(16, NUM_FEATURES))

    def build_discriminator(self, config: dict[str, Any]) -> nn.Module:
        return nn.Sequential(nn.Linear(NUM_FEATURES, 16), nn.ReLU(), nn.Linear(16, 1))

    def build_data(self, config: dict[str, Any]) -> tuple[Any, Any]:
        samples = torch.randn(2 * BATCH_SIZE * config["num_steps"], NUM_FEATURES)
        return DataLoader(TensorDataset(samples), batch_size=BATCH_SIZE), None


class ImageGAN(SmallGAN):
    """The networks of `examples/dcgan.py`."""

    def build_generator(self, config: dict[str, Any]) -> nn.Module:
        return nn.Sequential(
            nn.Linear(NOISE_DIM, 64 * 2 * 2, bias=False),
            nn.Unflatten(1, (64, 2, 2)),
            nn.BatchNorm2d(64),
            nn.ReLU(),
            nn.ConvTranspose2d(64, 32, kernel_size=4, stride=2, padding=1, bias=False),
            nn.BatchNorm2d(32),
            nn.ReLU(),
            nn.ConvTranspose2d(32, 1, kernel_size=4, stride=2, padding=1),
            nn.Tanh(),
        )

    def build_discriminator(self, config: dict[str, Any]) -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(1, 16, kernel_size=3, padding=1),
            nn.LeakyReLU(0.2),
            nn.Conv2d(16, 32, kernel_size=4, stride=2, padding=1, bias=False),
            nn.BatchNorm2d(32),
            nn.LeakyReLU(0.2),
            nn.Flatten(),
            nn.Linear(32 * 4 * 4, 1),
        )

    def build_data(self, config: dict[str, Any]) -> tuple[Any, Any]:
        images = torch.randn(2 * BATCH_SIZE * config["num_steps"], 1, 8, 8)
        return DataLoader(TensorDataset(images), batch_size=BATCH_SIZE), None


PROGRAMS: dict[str, type[TrainingOperator]] = {
    "stock": Stock,
    "sharpness-aware": SharpnessAware,
    "own train_epoch": OwnLoop,
    "small GAN": SmallGAN,
    "GAN of dcgan.py": ImageGAN,
}


def train_one(config: dict[str, Any]) -> dict[str, dict[str, list[float]]]:
    """A function with the network of `Stock` and one step in a batch."""
    norm = nn.BatchNorm1d(16)
    model = helpers.prepare_model(nn.Sequential(nn.Linear(NUM_FEATURES, 16), norm, nn.ReLU(), nn.Linear(16, 1)))
    optimizer = helpers.prepare_optimizer(torch.optim.Adam(model.parameters()))

    def step(samples: torch.Tensor) -> None:
        optimizer.zero_grad()
        nn.functional.mse_loss(model(samples), samples[:, :1]).backward()
        optimizer.step()

    return time_passes(step, config)


def train_two(config: dict[str, Any]) -> dict[str, dict[str, list[float]]]:
    """A function with the networks of `SmallGAN` and two optimizers that step in a batch."""
    gan = SmallGAN.__new__(SmallGAN)
    makers = gan.build_generator, gan.build_discriminator
    generator, discriminator = (helpers.prepare_model(make(config)) for make in makers)
    of_generator, of_discriminator = (
        helpers.prepare_optimizer(torch.optim.Adam(model.parameters())) for model in (generator, discriminator)
    )

    def step(samples: torch.Tensor) -> None:
        fake = generator(torch.randn(len(samples), NOISE_DIM))
        of_discriminator.zero_grad()
        (discriminator(fake.detach()).mean() - discriminator(samples).mean()).backward()
        of_discriminator.step()
        of_generator.zero_grad()
        (-discriminator(fake).mean()).backward()
        of_generator.step()

    return time_passes(step, config)


def time_passes(step: Callable[[torch.Tensor], None], config: dict[str, Any]) -> dict[str, dict[str, list[float]]]:
    """Trains pass after pass, with and without copies in turn; returns of this worker what `step_us` does."""
    samples = torch.randn(world_size() * BATCH_SIZE * config["num_steps"], NUM_FEATURES)
    loader = helpers.prepare_data_loader(DataLoader(TensorDataset(samples), batch_size=BATCH_SIZE), exact=True)
    found: dict[str, dict[str, list[float]]] = {mode: {name: [] for name in FIGURES} for mode in (OFF, ON)}
    for number in range(2 * config["num_rounds"] + 2):
        steps = accelerator_of("prepare_model").steps
        assert steps is not None
        mode, log = (OFF, ON, ON, OFF)[number % 4], steps._undo_log
        log._is_used = mode == ON
        before = _seen(log)
        for (batch,) in loader:
            step(batch)
        if number > 1:  # the first passes warm up
            _note(found[mode], np.subtract(_seen(log), before), config["num_steps"])
    return found


def _note(figures: dict[str, list[float]], spent: Any, num_steps: int) -> None:
    for figure, amount in zip(FIGURES, spent * (1e6, 1e6, 1) / num_steps, strict=True):
        figures[figure].append(amount.item())


FUNCTIONS: dict[str, Callable[..., Any]] = {"function": train_one, "function, two optimizers": train_two}


def _switch(operator: Any, undo: Any) -> None:
    """Goes on as if the trainer had been given this."""
    _log_of(operator)._mode = undo


def _log_of(operator: Any) -> UndoLog:
    log: UndoLog = operator._raysgd.parallel.step.exchanges.__self__
    return log


def _look(operator: Any) -> tuple[float, float, int]:
    return _seen(_log_of(operator))


def _seen(log: UndoLog) -> tuple[float, float, int]:
    """Of a worker so far: the seconds of its processor, those booked for copies, and how many batches were copied."""
    take = UndoLog._take
    if not hasattr(UndoLog, "num_taken"):

        @functools.wraps(take)
        def counted(log: Any, *arguments: Any) -> None:
            UndoLog.num_taken += 1  # type: ignore[attr-defined]
            take(log, *arguments)

        UndoLog.num_taken, UndoLog._take = 0, counted  # type: ignore[attr-defined, method-assign]
    booked_s = log._ledger.reading().seconds[SPENT_ON_COPIES]
    return time.process_time(), booked_s, UndoLog.num_taken  # type: ignore[attr-defined]


def step_us(program: str, num_steps: int, num_rounds: int, num_workers: int) -> dict[str, dict[str, list[float]]]:
    """Microseconds of a step in each call, and the share of its batches that were copied, by what may be undone."""
    modes = [OFF, AUTO, ON]
    config = {"num_steps": num_steps, "noise_dim": NOISE_DIM, "seed": 0, "lr": 0.001}
    if program in FUNCTIONS:
        return function_us(FUNCTIONS[program], {**config, "num_rounds": num_rounds}, num_workers)
    with ray_cluster(num_cpus=num_workers * 2):
        make = functools.partial(TorchTrainer, num_workers=num_workers, config=config)
        trainer = make(training_operator_cls=PROGRAMS[program])
        found: dict[str, dict[str, list[float]]] = {mode: {name: [] for name in FIGURES} for mode in modes}
        for number in range(num_rounds + 1):
            for mode in modes[number % len(modes) :] + modes[: number % len(modes)]:
                trainer.apply_all_operators(functools.partial(_switch, undo=UNDO[mode]))
                before = trainer.apply_all_operators(_look)
                trainer.train(num_steps=num_steps)
                after = trainer.apply_all_operators(_look)
                if number:  # the first round warms up
                    _note(found[mode], np.mean(after, axis=0) - np.mean(before, axis=0), num_steps)
        trainer.shutdown()
    return found


def function_us(
    function: Callable[..., Any], config: dict[str, Any], num_workers: int
) -> dict[str, dict[str, list[float]]]:
    """The same of a function."""
    with ray_cluster(num_cpus=num_workers * 2), tempfile.TemporaryDirectory() as folder:
        trainer = Trainer("torch", (1, num_workers), logdir=folder, elastic=True)
        trainer.start()
        told = trainer.run(function, config)
        trainer.shutdown()
    return {
        mode: {name: np.mean([each[mode][name] for each in told], axis=0).tolist() for name in FIGURES}
        for mode in (OFF, ON)
    }


def main() -> None:
    dispatch({OWN: step_us})
    parser = make_parser(__doc__.partition("\n")[0], repetitions=25, peers={})
    parser.add_argument("--programs", default=";".join([*PROGRAMS, *FUNCTIONS]), help="some of these")
    arguments = parser.parse_args()
    report = Report("undo_cost", arguments, choose_peers(arguments, {}))
    num_steps = SMOKE_NUM_STEPS if arguments.smoke_test else NUM_STEPS
    num_rounds = 1 if arguments.smoke_test else arguments.repetitions
    rows, targets = [], []
    for program in ["stock"] if arguments.smoke_test else arguments.programs.split(";"):
        job = functools.partial(run_job, __file__, OWN, program=program, num_steps=num_steps, num_rounds=num_rounds)
        found = job(num_workers=arguments.num_workers)
        base = estimate(found[OFF]["us"])
        report.result(OWN, "step_us", base, program=program)
        cells = [base.text()]
        for mode in (AUTO, ON):
            if mode not in found:
                cells += ["", "", ""]
                continue
            added = estimate([us - off for us, off in zip(found[mode]["us"], found[OFF]["us"], strict=True)])
            copied = estimate(found[mode]["copied"])
            report.result(OWN, "added_us", added, program=program, undo=mode)
            booked = estimate(found[mode]["booked_us"])
            report.result(OWN, "copied_share", copied, program=program, undo=mode)
            report.result(OWN, "booked_us", booked, program=program, undo=mode)
            cells += [added.text(), booked.text(), f"{copied.median:.0%}"]
            if mode == AUTO:
                most = max(MOST_US, MOST_SHARE * base.median)
                targets.append(Target(f'{program}: "auto" adds, us', most, True, added.median))
        rows.append([program, *cells, *[""] * (7 - len(cells))])
    by_mode = [each for mode in ('"auto"', "True") for each in (f"{mode} adds", "booked", "copied")]
    headers = ["program", "step, us", *by_mode]
    report.table("Added to an undisturbed step, microseconds", headers, rows)
    report.finish(targets)


if __name__ == "__main__":
    main()
