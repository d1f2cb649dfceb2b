"""One training in three frameworks, for tests: a line is fitted to points that the workers share out.

Every epoch is one step on all points. The parts are of equal size, so the gradient, and with it what is learned, is the
same for any number of workers, and however often the function is started again from its checkpoint.
"""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import numpy as np

from raysgd import train
from tests.train.lab import claim

NUM_POINTS = 8
LR = 0.2
MOMENTUM = 0.5


def points() -> tuple[Any, Any]:
    """All points, as columns."""
    x = np.linspace(-1, 1, NUM_POINTS, dtype=np.float32)[:, None]
    return x, 2 * x + 1


def own_points() -> tuple[Any, Any]:
    """The part of this worker."""
    x, y = points()
    own = slice(train.world_rank(), None, train.world_size())
    return x[own], y[own]


def learned_alone(num_epochs: int) -> list[float]:
    """Slope and intercept as one process finds them, from 0 and 0."""
    x, y = (column.astype(np.float64)[:, 0] for column in points())
    line, velocity = np.zeros(2), np.zeros(2)
    for _ in range(num_epochs):
        error = line[0] * x + line[1] - y
        velocity = MOMENTUM * velocity + 2 * np.array([(error * x).mean(), error.mean()])
        line = line - LR * velocity
    return [float(number) for number in line]


def end_epoch(config: dict[str, Any], epoch: int, **state: Any) -> None:
    """Reports and saves; where the run is to grow next, waits until there is room."""
    import ray

    train.report(number=epoch, size=train.world_size())
    train.save_checkpoint(epoch=epoch, **state)
    if epoch == config["waits_at"] and train.world_size() == 1:
        while ray.available_resources().get("CPU", 0) < 1:
            time.sleep(0.05)


def maybe_die(config: dict[str, Any], epoch: int) -> None:
    """Rank 1 dies once, in the middle of a step, so that others wait for it."""
    if (train.world_rank(), epoch) == (1, config["dies_at"]) and claim(config["flag"]):
        os.kill(os.getpid(), signal.SIGKILL)


def with_torch(config: dict[str, Any]) -> list[float]:
    """With `DistributedDataParallel`."""
    import torch

    from raysgd.train.torch import gather_state, load_state, prepare_model

    x, y = map(torch.from_numpy, own_points())
    model = torch.nn.Linear(1, 1)
    torch.nn.init.zeros_(model.weight), torch.nn.init.zeros_(model.bias)
    model = prepare_model(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=MOMENTUM)
    checkpoint, first = train.load_checkpoint(), 0
    if checkpoint is not None:
        first = checkpoint["epoch"] + 1
        load_state(model, checkpoint["model"])
        load_state(optimizer, checkpoint["optimizer"])
    for epoch in range(first, config["num_epochs"]):
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(model(x), y)
        maybe_die(config, epoch)
        loss.backward()
        optimizer.step()
        end_epoch(config, epoch, model=gather_state(model), optimizer=gather_state(optimizer))
    return [float(parameter.detach()) for parameter in model.parameters()]


def with_horovod(config: dict[str, Any]) -> list[float]:
    """With Horovod, as its own documentation has it."""
    import horovod.torch as hvd
    import torch

    hvd.init()
    assert (hvd.rank(), hvd.size()) == (train.world_rank(), train.world_size())
    x, y = map(torch.from_numpy, own_points())
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=MOMENTUM)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    checkpoint, first = train.load_checkpoint(), 0
    if checkpoint is not None:
        first = checkpoint["epoch"] + 1
        model.load_state_dict(checkpoint["model"])
        optimizer.load_state_dict(checkpoint["optimizer"])  # the wrapper begins with an empty one
    elif hvd.rank() == 0:  # the others hear of it
        torch.nn.init.zeros_(model.weight), torch.nn.init.zeros_(model.bias)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    for epoch in range(first, config["num_epochs"]):
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(model(x), y)
        maybe_die(config, epoch)
        loss.backward()
        optimizer.step()
        end_epoch(config, epoch, model=model.state_dict(), optimizer=optimizer.state_dict())
    return [float(parameter.detach()) for parameter in model.parameters()]


def with_tensorflow(config: dict[str, Any]) -> list[float]:
    """With `MultiWorkerMirroredStrategy` and a model of tf_keras."""
    import tensorflow as tf
    import tf_keras

    from raysgd.train.tensorflow import prepare_dataset_shard

    class Diary(tf_keras.callbacks.Callback):  # type: ignore[misc,name-defined]
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            weights = [np.asarray(value) for value in self.model.get_weights()]
            end_epoch(config, epoch, weights=weights, momenta=[variable.numpy() for variable in momenta])

        def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
            maybe_die(config, self.epoch)

        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            self.epoch = epoch

    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    assert strategy.num_replicas_in_sync == train.world_size()
    checkpoint = train.load_checkpoint() or {"epoch": -1}
    with strategy.scope():
        model = tf_keras.Sequential([tf_keras.layers.Dense(1, kernel_initializer="zeros", input_shape=(1,))])
        optimizer = tf_keras.optimizers.SGD(LR, momentum=MOMENTUM)
        optimizer.build(model.trainable_variables)
        model.compile(optimizer=optimizer, loss="mse")
    momenta = optimizer.momentums
    if "weights" in checkpoint:
        model.set_weights(checkpoint["weights"])
        for variable, value in zip(momenta, checkpoint["momenta"], strict=True):
            variable.assign(value)
    x, y = own_points()
    # The strategy takes the size of a batch for that of all workers together.
    data = prepare_dataset_shard(tf.data.Dataset.from_tensor_slices((x, y)).batch(NUM_POINTS))
    model.fit(
        data,
        initial_epoch=checkpoint["epoch"] + 1,
        epochs=config["num_epochs"],
        callbacks=[Diary()],
        verbose=0,
    )
    return [float(value.item()) for value in model.get_weights()]
