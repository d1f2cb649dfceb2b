"""Training speed on a GPU, per precision: raysgd's stock operator against a hand-written loop.

    python examples/benchmarks/gpu_throughput.py [--smoke-test] [--repetitions 20] [--models resnet50,lora]

It needs one NVIDIA GPU and a PyTorch that sees it; otherwise it says so and ends. `--smoke-test` runs tiny models on
the CPU, only to check that it runs.

Both loops run in this process, on copies of one model and the same synthetic batches, in turn: one epoch of the
hand-written loop, one epoch of the operator. The batches are in pinned memory and are copied without waiting. An
epoch ends when the GPU has finished it. In addition to the time, the benchmark counts how often the CPU waited for
the GPU in an epoch after the first step, according to PyTorch's synchronization warnings, and the peak memory.

The model "lora" is a Llama of 1.2 billion frozen bf16 parameters with an adapter, which trains in bf16 only. It needs
`transformers` and `peft`.
"""

from __future__ import annotations

import copy
import statistics
import time
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from _common import OWN, Estimate, Report, Target, choose_peers, estimate, in_pairs, make_parser, significant
from torch import nn

from raysgd import TorchTrainer, TrainingOperator
from raysgd.torch.resnet import ResNet50

NUM_CLASSES = 10
PRECISIONS = ("fp32", "fp16", "bf16")
NUM_WARM_UP_PAIRS = 3
NEEDS = (
    "gpu_throughput needs an NVIDIA GPU and a PyTorch that sees it (`torch.cuda.is_available()` is False here), so it "
    "measured nothing. Run it on a machine with one, or pass `--smoke-test` to see that it runs, on the CPU."
)


@dataclass(frozen=True)
class GPUWorkload:
    """A model and its data.

    Attributes:
        name: Name in the tables.
        make_model: Creates the model, on the GPU if there is one.
        make_features: Creates the inputs of this many samples.
        batch_size: Samples in a batch.
        num_steps: Batches in an epoch.
        precisions: Precisions in which to train the model.
        has_own_loss: True if the model computes the loss itself, from a batch that is a dict.
    """

    name: str
    make_model: Callable[[], nn.Module]
    make_features: Callable[[int], torch.Tensor]
    batch_size: int
    num_steps: int
    precisions: tuple[str, ...] = PRECISIONS
    has_own_loss: bool = False

    def batches(self, num_different: int = 4) -> list[Any]:
        """Return the batches of an epoch: a few batches that are repeated."""
        torch.manual_seed(1)
        made: list[Any] = []
        for _ in range(num_different):
            features = pinned(self.make_features(self.batch_size))
            if self.has_own_loss:
                made.append({"input_ids": features, "labels": features})
            else:
                made.append((features, pinned(torch.randint(NUM_CLASSES, (self.batch_size,)))))
        return [made[index % num_different] for index in range(self.num_steps)]


def pinned(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy of a tensor in pinned memory, or the tensor itself if there is no GPU."""
    return tensor.pin_memory() if torch.cuda.is_available() else tensor


class Classifier(nn.Module):
    """A transformer over tokens, with one output for each class.

    Args:
        width: Size of each token.
        depth: Number of layers.
        num_heads: Number of attention heads.
    """

    def __init__(self, width: int, depth: int, num_heads: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(1000, width)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(width, num_heads, 4 * width, batch_first=True, norm_first=True, dropout=0.0)
            for _ in range(depth)
        )
        self.head = nn.Linear(width, NUM_CLASSES)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        features = self.embedding(tokens)
        for layer in self.layers:
            features = layer(features)
        logits: torch.Tensor = self.head(features.mean(dim=1))
        return logits


def _images(num_samples: int) -> torch.Tensor:
    return torch.randn(num_samples, 3, 32, 32)


def _tokens(length: int) -> Callable[[int], torch.Tensor]:
    return lambda num_samples: torch.randint(1000, (num_samples, length))


def _cnn_tiny() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 4, 3, stride=4), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(256, NUM_CLASSES)
    )


def _llama(**sizes: int) -> Callable[[], nn.Module]:
    """Return a function that creates a Llama with random bf16 weights and an adapter."""

    def make() -> nn.Module:
        from peft import LoraConfig, get_peft_model
        from transformers import LlamaConfig, LlamaForCausalLM

        with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
            base = LlamaForCausalLM(LlamaConfig(vocab_size=1000, use_cache=False, **sizes)).bfloat16()
        model: nn.Module = get_peft_model(base, LoraConfig(task_type="CAUSAL_LM", r=16))
        return model

    return make


_LLAMA = _llama(hidden_size=2048, num_hidden_layers=16, num_attention_heads=16, intermediate_size=8192)
_LLAMA_TINY = _llama(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16)
WORKLOADS = (
    GPUWorkload("resnet50", lambda: ResNet50({}), _images, batch_size=256, num_steps=50),
    GPUWorkload("transformer", lambda: Classifier(512, 8, 8), _tokens(256), batch_size=64, num_steps=50),
    GPUWorkload("lora", _LLAMA, _tokens(512), 4, 20, precisions=("bf16",), has_own_loss=True),
)
SMOKE_WORKLOADS = (
    GPUWorkload("cnn_tiny", _cnn_tiny, _images, batch_size=2, num_steps=2),
    GPUWorkload("transformer_tiny", lambda: Classifier(16, 2, 2), _tokens(8), batch_size=2, num_steps=2),
    GPUWorkload("lora_tiny", _LLAMA_TINY, _tokens(8), 2, 2, precisions=("bf16",), has_own_loss=True),
)


class ByHand:
    """A hand-written loop.

    Args:
        model: Model to train.
        precision: Precision of the computation.
        device: Device of the model.
    """

    def __init__(self, model: nn.Module, precision: str, device: torch.device) -> None:
        self._model, self._device = model, device
        self._optimizer = sgd(model)
        self._dtype = {"fp16": torch.float16, "bf16": torch.bfloat16}.get(precision)
        self._scaler = torch.amp.GradScaler(device.type) if precision == "fp16" else None
        self._criterion = nn.CrossEntropyLoss()

    def train_epoch(self, batches: list[Any]) -> float:
        self._model.train()
        losses = []
        for batch in batches:
            with torch.autocast(self._device.type, self._dtype) if self._dtype else nullcontext():
                loss = self._loss_of(batch)
            self._optimizer.zero_grad()
            if self._scaler is None:
                loss.backward()
                self._optimizer.step()
            else:
                self._scaler.scale(loss).backward()
                self._scaler.step(self._optimizer)
                self._scaler.update()
            losses.append(loss.detach())
        return float(torch.stack(losses).mean())

    def _loss_of(self, batch: Any) -> torch.Tensor:
        if isinstance(batch, dict):
            moved = {name: each.to(self._device, non_blocking=True) for name, each in batch.items()}
            loss: torch.Tensor = self._model(**moved).loss
            return loss
        features, target = (each.to(self._device, non_blocking=True) for each in batch)
        loss = self._criterion(self._model(features), target)
        return loss


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    """Return the optimizer of both loops."""
    trained = [each for each in model.parameters() if each.requires_grad]
    return torch.optim.SGD(trained, lr=1e-4, momentum=0.9)  # small: the labels are noise


class Both(TrainingOperator):
    """Trains one model with the stock loop, and a copy with the hand-written loop."""

    excludes_frozen_from_state = True

    def setup(self, config: dict[str, Any]) -> None:
        workload: GPUWorkload = config["workload"]
        torch.manual_seed(0)
        model = workload.make_model()
        self.by_hand = ByHand(copy.deepcopy(model).to(self.device), config["precision"], self.device)
        if workload.has_own_loss:
            self.model, self.optimizer = self.register(models=model, optimizers=sgd(model))
        else:
            self.model, self.optimizer, self.criterion = self.register(
                models=model, optimizers=sgd(model), criterion=nn.CrossEntropyLoss()
            )
        self.batches = workload.batches()
        self.register_data(train_loader=self.batches)


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


@dataclass(frozen=True)
class Cost:
    """The measurements of an epoch."""

    step_s: float
    peak_mib: float
    num_waits: int


def measured(train_epoch: Callable[[], Any], num_steps: int) -> Cost:
    """Run an epoch."""
    has_gpu = torch.cuda.is_available()
    if has_gpu:
        torch.cuda.reset_peak_memory_stats()
    _synchronize()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if has_gpu:
            torch.cuda.set_sync_debug_mode("warn")
        began = time.perf_counter()
        train_epoch()
        if has_gpu:
            torch.cuda.set_sync_debug_mode("default")
        _synchronize()
        seconds = time.perf_counter() - began
    num_waits = sum("synchroniz" in str(warning.message) for warning in caught)
    peak_mib = torch.cuda.max_memory_allocated() / 2**20 if has_gpu else 0.0
    return Cost(seconds / num_steps, peak_mib, num_waits)


def measure(workload: GPUWorkload, precision: str, num_pairs: int, smoke_test: bool) -> list[tuple[Cost, Cost]]:
    """Return pairs of epochs, by hand and by the operator; which one goes first alternates."""
    config = {"workload": workload, "precision": precision}
    num_warm_up_pairs = 0 if smoke_test else NUM_WARM_UP_PAIRS
    with TorchTrainer(
        training_operator_cls=Both,
        config=config,
        precision=precision,
        use_gpu=torch.cuda.is_available(),
        use_local=True,
    ) as trainer:
        operator: Any = trainer.get_local_operator()
        contenders = (
            lambda: measured(lambda: operator.by_hand.train_epoch(operator.batches), workload.num_steps),
            lambda: measured(trainer.train, workload.num_steps),
        )
        return in_pairs(*contenders, num_pairs=num_pairs, num_warm_up=num_warm_up_pairs)


def report_pairs(
    report: Report, workload: GPUWorkload, precision: str, pairs: list[tuple[Cost, Cost]]
) -> tuple[list[str], float]:
    """Record the figures of one model and precision; return a table row, and the relative speed."""
    speed: Estimate = estimate([by_hand.step_s / own.step_s for by_hand, own in pairs])
    labels = {"workload": workload.name, "precision": precision}
    report.result(OWN, "paired_relative_speed", speed, **labels)
    row = [workload.name, precision]
    for index, name in enumerate(("by_hand", OWN)):
        step_s = statistics.median(pair[index].step_s for pair in pairs)
        peak_mib = max(pair[index].peak_mib for pair in pairs)
        num_waits = max(pair[index].num_waits for pair in pairs)
        report.result(name, "samples_per_s", workload.batch_size / step_s, **labels)
        report.result(name, "peak_mib", peak_mib, **labels)
        report.result(name, "waits_per_epoch", float(num_waits), **labels)
        row += [significant(workload.batch_size / step_s), significant(peak_mib), str(num_waits)]
    return [*row, speed.text(4)], speed.median


def main() -> None:
    parser = make_parser(__doc__.partition("\n")[0], repetitions=20, peers={})
    parser.add_argument("--models", default=",".join(workload.name for workload in WORKLOADS), help="which models")
    parser.add_argument("--precisions", default=",".join(PRECISIONS), help="which precisions")
    arguments = parser.parse_args()
    arguments.num_workers = 1
    if not torch.cuda.is_available() and not arguments.smoke_test:
        print(NEEDS)
        return
    if arguments.smoke_test:
        arguments.repetitions = 1
    report = Report("gpu_throughput", arguments, choose_peers(arguments, {}))
    if torch.cuda.is_available():
        print(f"GPU: {torch.cuda.get_device_name()}, CUDA {torch.version.cuda}")
    rows, targets = [], []
    chosen = [workload for workload in WORKLOADS if workload.name in arguments.models.split(",")]
    for workload in SMOKE_WORKLOADS if arguments.smoke_test else chosen:
        for precision in filter(workload.precisions.__contains__, arguments.precisions.split(",")):
            pairs = measure(workload, precision, arguments.repetitions, arguments.smoke_test)
            row, speed = report_pairs(report, workload, precision, pairs)
            rows.append(row)
            print(f"{workload.name} in {precision}: {speed:.4f} of the speed by hand", flush=True)
            targets.append(Target(f"{workload.name}, {precision}: by hand / raysgd, step time", 0.99, False, speed))
    headers = ["model", "precision"]
    headers += [f"{what} {who}" for who in ("by hand", "raysgd") for what in ("samples/s", "peak MiB", "waits")]
    report.table("Paired, in one process", [*headers, "relative speed of raysgd"], rows)
    report.finish(targets)


if __name__ == "__main__":
    main()
