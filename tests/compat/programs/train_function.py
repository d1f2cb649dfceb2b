"""Ray 1.13: `ray.train` with a checkpoint, callbacks and prepared models."""
# ray_train

import ray
import ray.train.torch
import torch
from ray import train
from ray.train import CheckpointStrategy, Trainer
from ray.train.callbacks import JsonLoggerCallback, TrainingCallback


class Printed(TrainingCallback):
    def handle_result(self, results, **info):
        print("loss", sum(result["loss"] for result in results) / len(results))


def train_func(config):
    torch.manual_seed(0)  # from some first weights, the last batch of an epoch says little
    model = train.torch.prepare_model(torch.nn.Linear(1, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=config["lr"])
    x = torch.linspace(-1, 1, 32).reshape(-1, 1)
    loader = train.torch.prepare_data_loader(torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, 2 * x), 8))
    for epoch in range(3):
        for features, target in loader:
            loss = ((model(features) - target) ** 2).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        train.save_checkpoint(epoch=epoch)
        train.report(loss=loss.item())


ray.init(num_cpus=2, include_dashboard=False)
trainer = Trainer(backend="torch", num_workers=2, logdir="results")
trainer.start()
trainer.run(
    train_func,
    config={"lr": 0.1},
    callbacks=[Printed(), JsonLoggerCallback()],
    checkpoint_strategy=CheckpointStrategy(num_to_keep=1),
)
assert trainer.latest_checkpoint["epoch"] == 2
trainer.shutdown()
