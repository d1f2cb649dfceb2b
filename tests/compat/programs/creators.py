"""Ray 0.8: creator functions and an own operator together, a config with attributes, `num_replicas`."""

import torch
from ray.util.sgd import TorchTrainer
from ray.util.sgd.torch import TrainingOperator


class Options(dict):
    """A config whose entries are attributes too."""

    def __init__(self):
        pass

    def __getattr__(self, name):
        if name not in self:
            raise AttributeError(name)
        return self[name]

    def __setattr__(self, name, value):
        self[name] = value


def model_creator(config):
    return torch.nn.Linear(1, 1)


def optimizer_creator(model, config):
    return torch.optim.SGD(model.parameters(), lr=config.lr)


def data_creator(config):
    x = torch.linspace(-1, 1, 64).reshape(-1, 1)
    return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, 3 * x + 1), batch_size=8)


class Counting(TrainingOperator):
    def setup(self, config):
        self.num_batches, self.lr = 0, config.lr

    def train_batch(self, batch, batch_info):
        self.num_batches += 1
        x, y = batch
        self.optimizer.zero_grad()
        loss = self.criterion(self.model(x), y)
        loss.backward()
        self.optimizer.step()
        return {"loss": loss.item(), "lr": self.lr}


if __name__ == "__main__":
    options = Options()
    options.lr = 0.1
    trainer = TorchTrainer(
        model_creator=model_creator,
        data_creator=data_creator,
        optimizer_creator=optimizer_creator,
        loss_creator=torch.nn.MSELoss,
        training_operator_cls=Counting,
        num_replicas=2,
        config=options,
    )
    for _ in range(3):
        print("loss", trainer.train()["loss"])
    assert isinstance(trainer.get_model(), torch.nn.Linear)
    trainer.shutdown()
