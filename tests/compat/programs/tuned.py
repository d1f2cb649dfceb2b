"""Ray 1.x: a sweep over trials of creator functions, which a stopper ends."""

import ray
import torch
from ray import tune
from ray.tune import CLIReporter, Stopper
from ray.util.sgd.torch import TorchTrainer
from ray.util.sgd.utils import BATCH_SIZE


def model_creator(config):
    torch.manual_seed(0)
    return torch.nn.Linear(1, 1)


def optimizer_creator(model, config):
    return torch.optim.SGD(model.parameters(), lr=config["lr"], momentum=config["momentum"])


def data_creator(config):
    x = torch.linspace(-1, 1, 64).reshape(-1, 1)
    data = torch.utils.data.TensorDataset(x, 2 * x)
    return [torch.utils.data.DataLoader(data, config[BATCH_SIZE], shuffle=shuffle) for shuffle in (True, False)]


def scheduler_creator(optimizer, config):
    return torch.optim.lr_scheduler.StepLR(optimizer, step_size=2)


class GoodEnough(Stopper):
    def __call__(self, trial_id, result):
        return result["val_loss"] < 1e-6 or result["training_iteration"] >= 3

    def stop_all(self):
        return False


ray.init(num_cpus=3, include_dashboard=False, ignore_reinit_error=True)
trainable = TorchTrainer.as_trainable(
    model_creator=model_creator,
    data_creator=data_creator,
    optimizer_creator=optimizer_creator,
    loss_creator=torch.nn.MSELoss,
    scheduler_creator=scheduler_creator,
    scheduler_step_freq="epoch",
    use_gpu=False,
    config={BATCH_SIZE: 16, "seed": 1},
    num_workers=1,
)
reporter = CLIReporter()
reporter.add_metric_column("val_loss")
found = tune.run(
    trainable,
    num_samples=1,
    config={"lr": tune.grid_search([0.01, 0.1]), "momentum": tune.sample_from(lambda _: 0.5)},
    progress_reporter=reporter,
    stop=GoodEnough(),
    checkpoint_freq=2,
    checkpoint_at_end=True,
    keep_checkpoints_num=1,
    max_failures=1,
    verbose=0,
)
for trial in sorted(found.trials, key=lambda trial: trial.config["lr"]):
    print("loss", trial.last_result["val_loss"])
assert found.get_best_config(metric="val_loss", mode="min")["lr"] == 0.1
