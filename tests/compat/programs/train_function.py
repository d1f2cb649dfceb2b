"""Ray 1.13: `ray.train`, with what it prepares, a checkpoint and callbacks; each worker returns weights and results."""
# ray_train

import os

import ray
import ray.train as train
import torch
from ray.train import CheckpointStrategy, Trainer
from ray.train.callbacks import JsonLoggerCallback, TrainingCallback


class Printed(TrainingCallback):
    def handle_result(self, results, **info):
        print("loss", sum(result["loss"] for result in results) / len(results))


def train_batches(loader, model, loss_fn, optimizer, scheduler):
    model.train()
    for features, target in loader:
        mask = ~torch.isnan(target)
        loss = (loss_fn(model(features), torch.nan_to_num(target)) * mask).sum() / mask.sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()


@torch.no_grad()
def validate_epoch(loader, model, loss_fn):
    model.eval()
    losses = [loss_fn(model(features), target) for features, target in loader]
    return {"process_id": os.getpid(), "loss": torch.cat(losses).mean().item()}


def train_epochs(config):
    torch.manual_seed(0)
    model, loss_fn = torch.nn.Linear(1, 1), torch.nn.MSELoss(reduction="none")
    optimizer = torch.optim.SGD(model.parameters(), lr=config["lr"])
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99)
    x = torch.linspace(-1, 1, 32).reshape(-1, 1)
    loaders = [torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, 2 * x), batch_size=8) for _ in range(2)]
    train_loader, validation_loader = map(train.torch.prepare_data_loader, loaders)
    model = train.torch.prepare_model(model)
    results = []
    for epoch in range(3):
        train_batches(train_loader, model, loss_fn, optimizer, scheduler)
        result = validate_epoch(validation_loader, model, loss_fn)
        result["epoch"] = epoch + 1
        train.save_checkpoint(epoch=epoch)
        train.report(**result)
        results.append(result)
    return model.state_dict(), results


ray.init(num_cpus=2, include_dashboard=False, ignore_reinit_error=True)
trainer = Trainer(backend="torch", num_workers=2, logdir="results", use_gpu=False)
trainer.start()
response = trainer.run(
    train_epochs,
    {"lr": 0.1},
    callbacks=[Printed(), JsonLoggerCallback()],
    checkpoint_strategy=CheckpointStrategy(num_to_keep=1),
)
assert trainer.latest_checkpoint["epoch"] == 2
trainer.shutdown()
assert [len(results) for _, results in response] == [3, 3]
