"""Ray 2.0: Ray AIR, `fit()`."""
# ray_train

import torch
from ray.air import Checkpoint, session
from ray.air.config import RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer, prepare_model


def loop(config):
    model = prepare_model(torch.nn.Linear(1, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=config["lr"])
    x = torch.linspace(-1, 1, 32).reshape(-1, 1)
    for epoch in range(3):
        loss = ((model(x) - 2 * x) ** 2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        session.report({"loss": loss.item()}, checkpoint=Checkpoint.from_dict({"epoch": epoch}))


trainer = TorchTrainer(
    train_loop_per_worker=loop,
    train_loop_config={"lr": 0.1},
    scaling_config=ScalingConfig(num_workers=2),
    run_config=RunConfig(local_dir="results", name="fit"),
)
result = trainer.fit()
for loss in result.metrics_dataframe["loss"]:
    print("loss", loss)
assert result.checkpoint.to_dict()["epoch"] == 2
