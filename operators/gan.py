"""`GANOperator`: trains a generator against a discriminator."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from raysgd.operators import options
from raysgd.operators.loaders import ReadyMadeOperator
from raysgd.utils import NUM_SAMPLES


class GANOperator(ReadyMadeOperator):
    """Trains a generative adversarial network. You provide both networks and the data.

    Override `build_discriminator`, `build_generator` and `build_data`. The generator maps noise of shape
    `(num_samples, noise_dim)` to samples. The discriminator returns one logit per sample. A batch is a tensor of real
    samples, or a sequence whose first item is that tensor (labels are ignored).

    `train` reports `loss_d` and `loss_g`. `validate` reports `val_loss_d` and `val_loss_g`, which say little about
    sample quality. Override `score_samples` to add metrics of sample quality. `TorchTrainer.predict(noise)` generates a
    sample from each row of noise. `TorchTrainer.get_model()` returns `[discriminator, generator]`.

    You can also override `build_optimizers`, `sample_noise`, `discriminator_loss`, `generator_loss` and `real_samples`
    independently of each other. `setup` calls the `build_...` methods. If you override `setup`, call
    `super().setup(config)`.

    All config keys are optional, and you can add your own:

    * `noise_dim`: Length of the noise vector per sample. Default: 64.
    * `lr`: Learning rate of both networks. Default: 0.0002.
    * `lr_discriminator`, `lr_generator`: Learning rate of one network. Default: `lr`.
    * `batch_size`: Samples per step and worker. With `split_batches=True`, samples per step over all workers.
      Default: 32. To set the global batch size in either case, use the key `raysgd.utils.BATCH_SIZE` instead.
    * `seed`: Seed for PyTorch's generators, which determine the initial weights, the data order and the noise.

    Examples:
        >>> import torch
        >>> from raysgd import TorchTrainer
        >>> class Bell(GANOperator):
        ...     def build_discriminator(self, config):
        ...         return torch.nn.Sequential(torch.nn.Linear(1, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
        ...
        ...     def build_generator(self, config):
        ...         return torch.nn.Linear(config["noise_dim"], 1)
        ...
        ...     def build_data(self, config):
        ...         return torch.randn(100, 1), None
        >>> options = {"config": {"noise_dim": 2, "batch_size": 25}, "split_batches": True}
        >>> with TorchTrainer(training_operator_cls=Bell, **options, use_local=True) as trainer:
        ...     result = trainer.train()
        >>> sorted(name for name in result if name.startswith("loss"))
        ['loss_d', 'loss_g']

    Attributes:
        discriminator: The registered discriminator.
        generator: The registered generator.
        noise_dim: Length of the noise vector per sample.
    """

    discriminator: torch.nn.Module
    generator: torch.nn.Module
    noise_dim: int

    def build_discriminator(self, config: dict[str, Any]) -> torch.nn.Module:
        """Create the discriminator. It must return one logit per sample. Override this."""
        raise NotImplementedError(f"Override `{type(self).__name__}.build_discriminator` to return the discriminator.")

    def build_generator(self, config: dict[str, Any]) -> torch.nn.Module:
        """Create the generator. It must map noise to samples. Override this."""
        raise NotImplementedError(f"Override `{type(self).__name__}.build_generator` to return the generator.")

    def build_optimizers(
        self, discriminator: torch.nn.Module, generator: torch.nn.Module, config: dict[str, Any]
    ) -> Sequence[torch.optim.Optimizer]:
        """Create the discriminator's and the generator's optimizers, in this order.

        Default: Adam with the betas commonly used for GANs.
        """
        lr = options.number(config, "lr", default=2e-4, positive=True)
        lr_d = options.number(config, "lr_discriminator", default=lr, positive=True)
        lr_g = options.number(config, "lr_generator", default=lr, positive=True)
        return (
            torch.optim.Adam(discriminator.parameters(), lr=lr_d, betas=(0.5, 0.999)),
            torch.optim.Adam(generator.parameters(), lr=lr_g, betas=(0.5, 0.999)),
        )

    def sample_noise(self, num_samples: int, rng: torch.Generator | None = None) -> torch.Tensor:
        """Draw noise for the generator.

        Args:
            num_samples: Number of noise vectors to draw.
            rng: Random generator. Default: PyTorch's global generator, which training uses.
        """
        return torch.randn(num_samples, self.noise_dim, device=self.device, generator=rng)

    def discriminator_loss(self, real: torch.Tensor, generated: torch.Tensor) -> torch.Tensor:
        """Return the discriminator's loss. `generated` is detached from the generator's graph."""
        return self._loss(self.discriminator(real), 1.0) + self._loss(self.discriminator(generated), 0.0)

    def generator_loss(self, generated: torch.Tensor) -> torch.Tensor:
        """Return the generator's loss, which is high if the discriminator recognizes the samples as generated."""
        return self._loss(self.discriminator(generated), 1.0)

    def score_samples(self, real: torch.Tensor, generated: torch.Tensor) -> dict[str, Any]:
        """Return additional metrics for `validate` from equal numbers of real and generated samples. Override this.

        Both networks are in evaluation mode. Do not call collectives here, because ranks may have different numbers of
        batches.
        """
        return {}

    def real_samples(self, batch: Any) -> torch.Tensor:
        """Extract the real samples from a batch and move them to the device."""
        samples: torch.Tensor = batch[0] if isinstance(batch, list | tuple) else batch
        return samples.to(self.device, non_blocking=True)

    def _register_parts(self, config: dict[str, Any]) -> None:
        self.noise_dim = options.count(config, "noise_dim", default=64)
        discriminator, generator = self.build_discriminator(config), self.build_generator(config)
        optimizers = tuple(self.build_optimizers(discriminator, generator, config))
        if len(optimizers) != 2:
            raise TypeError(
                f"`build_optimizers` returned {len(optimizers)} optimizers: return two, the discriminator's first."
            )
        models, self._pair_of_optimizers, self.criterion = self.register(
            models=(discriminator, generator),
            optimizers=optimizers,
            criterion=torch.nn.BCEWithLogitsLoss(),
            ddp_args=_quiet_buffers(),
        )
        self.discriminator, self.generator = models
        # `TrainingOperator` calls `.train()` and `.eval()` on `self.model`, so `self.model` must contain both networks.
        self.model = torch.nn.ModuleList(models)

    def train_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
        """Update the discriminator, then update the generator against the updated discriminator."""
        real = self.real_samples(batch)
        optimizer_d, optimizer_g = self._pair_of_optimizers
        with self.timers.record("generate"), self.autocast():
            generated = self.generator(self.sample_noise(len(real)))
        with self.timers.record("discriminator"):
            with self.autocast():
                loss_d = self.discriminator_loss(real, generated.detach())
            self._minimize(loss_d, optimizer_d)
        with self.timers.record("generator"), frozen(self.discriminator):
            with self.autocast():
                loss_g = self.generator_loss(generated)
            self._minimize(loss_g, optimizer_g)
        return {"loss_d": loss_d.detach(), "loss_g": loss_g.detach(), NUM_SAMPLES: len(real)}

    def validate_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
        """Compute both networks' losses and the metrics of `score_samples` for a batch.

        The generator creates as many samples as the batch has real samples. The noise is seeded by rank and batch
        index. An unchanged generator is therefore scored on the same samples in every validation, and validation does
        not affect the random numbers of training.
        """
        real = self.real_samples(batch)
        rng = torch.Generator(self.device).manual_seed(batch_info["batch_idx"] * 2**16 + self.world_rank)
        with self.autocast():
            generated = self.generator(self.sample_noise(len(real), rng))
            loss_d, loss_g = self.discriminator_loss(real, generated), self.generator_loss(generated)
        scores = self.score_samples(real, generated)
        return {"val_loss_d": loss_d, "val_loss_g": loss_g, **scores, NUM_SAMPLES: len(real)}

    def predict_batch(self, batch: Any, batch_info: Mapping[str, Any]) -> Any:
        """Generate one sample from each row of noise. Use `sample_noise` to draw the noise."""
        noise: torch.Tensor = batch[0] if isinstance(batch, list | tuple) else batch
        with self.autocast():
            return self.generator(noise.to(self.device, non_blocking=True))

    def _loss(self, scores: torch.Tensor, target: float) -> torch.Tensor:
        return self.criterion(scores, torch.full_like(scores, target))

    def _minimize(self, loss: torch.Tensor, optimizer: torch.optim.Optimizer) -> None:
        """Compute the gradients of a network's loss and step its optimizer, also in mixed precision."""
        self.backward(loss, optimizer=optimizer)
        self.optimizer_step(optimizer)


@contextmanager
def frozen(model: torch.nn.Module) -> Iterator[None]:
    """Inside the block, let gradients flow through a model, but compute no gradients for its own parameters."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    for parameter in trained:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in trained:
            parameter.requires_grad_(True)


def _quiet_buffers() -> dict[str, bool]:
    """Return options that stop `DistributedDataParallel` from broadcasting buffers before each forward pass.

    The discriminator runs two forward passes before its backward pass. On some devices, the backward pass fails if
    a broadcast overwrites batch-normalization buffers in between. Ranks may therefore hold different buffers during
    training; snapshots contain rank 0's buffers.
    """
    known = inspect.signature(DistributedDataParallel).parameters
    return {"forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers": False}
