"""horovod.ray: a function with Horovod on its executor; three lines are changed by hand."""

import horovod.torch as hvd
import torch
from horovod.ray import RayExecutor


def train(num_epochs):
    hvd.init()
    torch.manual_seed(0)
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    x, losses = torch.linspace(-1, 1, 32).reshape(-1, 1), []
    for _ in range(num_epochs):
        loss = ((model(x) - 2 * x) ** 2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


executor = RayExecutor(RayExecutor.create_settings(timeout_s=30), num_workers=2, use_gpu=False)
executor.start()
found = executor.run(train, kwargs={"num_epochs": 3})
executor.shutdown()
for loss in found[0]:
    print("loss", loss)
