"""Ray 1.7: RaySGD v2, a training function."""

import torch
from ray.util.sgd import v2 as sgd
from ray.util.sgd.v2 import Trainer
from ray.util.sgd.v2.callbacks import SGDCallback


class Printed(SGDCallback):
    def handle_result(self, results, **info):
        print("loss", results[0]["loss"])


def train_func(config):
    torch.manual_seed(0)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(1, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=config["lr"])
    x = torch.linspace(-1, 1, 32).reshape(-1, 1)
    for epoch in range(3):
        loss = ((model(x) - 2 * x) ** 2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        sgd.report(loss=loss.item(), epoch=epoch)


trainer = Trainer(backend="torch", num_workers=2)
trainer.start()
trainer.run(train_func, {"lr": 0.1}, callbacks=[Printed()])
trainer.shutdown()
