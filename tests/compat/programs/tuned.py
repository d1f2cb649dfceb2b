"""Ray 1.x: a sweep over trials of `TorchTrainer`."""

import ray
import torch
from ray import tune
from ray.util.sgd.torch import TorchTrainer, TrainingOperator
from ray.util.sgd.utils import BATCH_SIZE


class Line(TrainingOperator):
    def setup(self, config):
        model = torch.nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=config["lr"])
        self.model, self.optimizer, self.criterion = self.register(
            models=model, optimizers=optimizer, criterion=torch.nn.MSELoss()
        )
        x = torch.linspace(-1, 1, 64).reshape(-1, 1)
        data = torch.utils.data.TensorDataset(x, 2 * x)
        self.register_data(
            train_loader=torch.utils.data.DataLoader(data, config[BATCH_SIZE]),
            validation_loader=torch.utils.data.DataLoader(data, config[BATCH_SIZE]),
        )


ray.init(num_cpus=3, include_dashboard=False)
trainable = TorchTrainer.as_trainable(training_operator_cls=Line, num_workers=1, use_gpu=False, config={BATCH_SIZE: 16})
found = tune.run(
    trainable, num_samples=1, config={"lr": tune.grid_search([0.01, 0.1])}, stop={"training_iteration": 3}, verbose=0
)
for trial in sorted(found.trials, key=lambda trial: trial.config["lr"]):
    print("loss", trial.last_result["val_loss"])
