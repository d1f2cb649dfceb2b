"""Ray 2.0: Ray AIR, `fit()` with a dataset, the weights among the metrics, and a folder as the last checkpoint."""
# ray_train

import os
import tempfile

import ray.data
import torch
from ray import train
from ray.air import session
from ray.air.config import FailureConfig, RunConfig, ScalingConfig
from ray.train import Checkpoint
from ray.train.torch import TorchCheckpoint, TorchTrainer


def loop(config):
    torch.manual_seed(0)
    shard, others = session.get_dataset_shard("train"), session.get_dataset_shard("evaluate")
    model = train.torch.prepare_model(config["model"])
    optimizer = torch.optim.SGD(model.parameters(), lr=config["lr"])
    for epoch in range(3):
        losses = []
        for batch in shard.iter_torch_batches(batch_size=8):
            loss = ((model(batch["x"].float().reshape(-1, 1)) - batch["y"].float().reshape(-1, 1)) ** 2).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        session.report({"train_loss": sum(losses) / len(losses), "model": model.state_dict(), "epoch": epoch})
    assert others is None
    states = model.module.state_dict() if hasattr(model, "module") else model.state_dict()
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = None
        if train.get_context().get_world_rank() == 0:
            torch.save(states, os.path.join(folder, "model.pt"))
            checkpoint = Checkpoint.from_directory(folder)
        session.report({}, checkpoint=checkpoint)


points = [{"x": n / 32 - 1, "y": n / 16 - 2} for n in range(64)]
trainer = TorchTrainer(
    loop,
    train_loop_config={"lr": 0.1, "model": torch.nn.Linear(1, 1)},
    scaling_config=ScalingConfig(num_workers=2, resources_per_worker={"CPU": 1, "memory": 10 * 2**20}),
    run_config=RunConfig(local_dir="results", name="fit", failure_config=FailureConfig(max_failures=3)),
    datasets={"train": ray.data.from_items(points)},
)
assert "\n" not in repr(trainer)
result = trainer.fit()
for loss in result.metrics_dataframe["train_loss"].dropna():
    print("loss", loss)
model = TorchCheckpoint(result.checkpoint.to_directory()).get_model(torch.nn.Linear(1, 1))
assert 0 < model.weight.item() < 2.5
