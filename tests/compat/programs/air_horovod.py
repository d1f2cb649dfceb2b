"""Ray 2.0: Ray AIR, a function with Horovod."""
# ray_train

import horovod.torch as hvd
import torch
from ray.air import Checkpoint, session
from ray.air.config import CheckpointConfig, FailureConfig, RunConfig, ScalingConfig
from ray.train.horovod import HorovodTrainer


def loop(config):
    hvd.init()
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=config["lr"])
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    x = torch.linspace(-1, 1, 32)[session.get_world_rank() :: session.get_world_size()].reshape(-1, 1)
    for _ in range(4):
        loss = ((model(x) - 2 * x) ** 2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        session.report({"loss": loss.item()}, checkpoint=Checkpoint.from_dict({"model": model.state_dict()}))


trainer = HorovodTrainer(
    loop,
    train_loop_config={"lr": 0.2},
    scaling_config=ScalingConfig(num_workers=2),
    run_config=RunConfig(
        local_dir="results",
        failure_config=FailureConfig(max_failures=1),
        checkpoint_config=CheckpointConfig(
            num_to_keep=1, checkpoint_score_attribute="loss", checkpoint_score_order="min"
        ),
    ),
)
result = trainer.fit()
for loss in result.metrics_dataframe["loss"]:
    print("loss", loss)
assert len(result.best_checkpoints) == 1
