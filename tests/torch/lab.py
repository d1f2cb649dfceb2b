"""Replicas side by side in the workers of a running trainer: real process groups, without a start for every case."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from raysgd.core.engine.shared.types import World
from raysgd.core.numbers import results
from raysgd.core.numbers.meters import MetricSummary
from raysgd.torch import TorchTrainer, TrainingOperator
from raysgd.torch.operator.settings import TorchSettings
from raysgd.torch.torch_runner import TorchRunner
from raysgd.trainer.messages.epochs import EpochAnswer, EpochRequest

SEED = 5


@dataclass(frozen=True)
class Experiment:
    """What to do with a new operator on every rank: `calls` are pairs of "train" or "validate" and number of steps."""

    operator_cls: type[TrainingOperator]
    config: Mapping[str, Any] = field(default_factory=dict)
    calls: Sequence[tuple[str, int | None]] = (("train", None),)
    options: Mapping[str, Any] = field(default_factory=dict)

    def run_in(self, world: World) -> tuple[list[EpochAnswer], Any]:
        """Answers, the weights of the model, the learning rates, and the batches seen."""
        runner = TorchRunner(TorchSettings(self.operator_cls, self.config, **self.options), world)
        runner.setup()
        answers = []
        for call, num_steps in self.calls:
            method = {"train": runner.train_epoch, "validate": runner.validate}[call]
            answers.append(method(EpochRequest(num_steps, {}, False, SEED)))
        state = runner.state()
        rates = [group["lr"] for optimizer in state["optimizers"] for group in optimizer["param_groups"]]
        end = {"models": state["models"], "rates": rates, "seen": getattr(runner.operator, "seen", None)}
        runner.shutdown()
        return answers, end


@dataclass(frozen=True)
class Findings:
    """What came of an experiment.

    Attributes:
        results: The merged result of each call.
        single: The result of each call on each rank.
        model: The weights on each rank.
        rates: The learning rates on each rank in the end.
        seen: The numbers of the samples in each batch on each rank.
    """

    results: list[dict[str, Any]]
    single: list[list[dict[str, Any]]]
    model: list[dict[str, Any]]
    rates: list[list[float]]
    seen: list[list[list[int]]]


def run_alone(experiment: Experiment) -> Findings:
    """Run it as one replica in this process."""
    return _findings([experiment.run_in(World(rank=0, size=1))])


def validate_on_spare(operator_cls: type[TrainingOperator], config: Mapping[str, Any]) -> tuple[Any, Any, Any]:
    """Metrics of a spare at its start, of a worker that has trained, and of the spare with the state of that worker."""
    settings, request = TorchSettings(operator_cls, config), EpochRequest(None, {}, False, SEED)
    worker, spare = (TorchRunner(settings, World(rank=0, size=1)) for _ in range(2))
    worker.setup(), spare.setup()
    before = spare.validate(request)
    worker.train_epoch(request)
    capture = worker.capture(None)
    state = capture.shared_state if capture.token is None else worker.fetch(capture.token)
    inline, beside = worker.validate(request), spare.validate_on_loan(1, settings, state, request)
    assert beside is not None
    return _metrics(before), _metrics(inline), _metrics(beside)


def run_together(lab: TorchTrainer, experiment: Experiment) -> Findings:
    """Run it as one replica in each worker of `lab`, in its group."""

    def run(operator: TrainingOperator) -> tuple[list[EpochAnswer], Any]:
        return experiment.run_in(World(operator.world_rank, operator.world_size))

    return _findings(lab.apply_all_operators(run))


def _findings(outcomes: Sequence[tuple[list[EpochAnswer], Any]]) -> Findings:
    by_call = list(zip(*[answers for answers, _ in outcomes], strict=True))
    return Findings(
        results=[results.merge([_metrics(answer) for answer in answers]) for answers in by_call],
        single=[[dict(_metrics(answer)) for answer in answers] for answers in by_call],
        model=[end["models"][0] for _, end in outcomes],
        rates=[end["rates"] for _, end in outcomes],
        seen=[end["seen"] for _, end in outcomes],
    )


def _metrics(answer: EpochAnswer) -> MetricSummary:
    assert answer.metrics is not None
    return answer.metrics
