"""Ray 1.7: RaySGD v2, a training function that reports its weights and returns its model."""

import ray.util.sgd.v2 as sgd
import torch
from ray.util.sgd.v2 import TorchConfig, Trainer
from ray.util.sgd.v2.callbacks import JsonLoggerCallback, SGDCallback
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Printed(SGDCallback):
    def handle_result(self, results, **info):
        print("loss", results[0]["loss"])


def train_func(config):
    torch.manual_seed(0)
    device = torch.device(f"cuda:{sgd.local_rank()}" if torch.cuda.is_available() else "cpu")
    model = torch.nn.parallel.DistributedDataParallel(config["model"].to(device))
    optimizer = torch.optim.SGD(model.parameters(), lr=config.get("lr", 1e-2))
    x = torch.linspace(-1, 1, 64).reshape(-1, 1)
    data = TensorDataset(x, 2 * x)
    loader = DataLoader(data, 8, sampler=DistributedSampler(data))
    for epoch in range(3):
        losses = []
        for features, target in loader:
            loss = ((model(features) - target) ** 2).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        sgd.report(**{"model": model.state_dict(), "loss": torch.stack(losses).mean().item(), "epoch": epoch})
        sgd.save_checkpoint(epoch=epoch)
    return model.module.to("cpu")


trainer = Trainer(TorchConfig(backend="gloo"), num_workers=2, logdir="results")
trainer.start()
models = trainer.run(
    train_func, {"model": torch.nn.Linear(1, 1), "lr": 0.1}, callbacks=[Printed(), JsonLoggerCallback()]
)
trainer.shutdown()
assert torch.equal(models[0].weight, models[1].weight)
