"""Ray 0.8: creator functions, `num_replicas`, the batch size as an argument."""

import torch
from ray.util.sgd import TorchTrainer


def model_creator(config):
    return torch.nn.Linear(1, 1)


def optimizer_creator(model, config):
    return torch.optim.SGD(model.parameters(), lr=config.get("lr", 0.1))


def data_creator(config):
    x = torch.linspace(-1, 1, 64).reshape(-1, 1)
    return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, 3 * x + 1), batch_size=8)


if __name__ == "__main__":
    trainer = TorchTrainer(
        model_creator=model_creator,
        data_creator=data_creator,
        optimizer_creator=optimizer_creator,
        loss_creator=torch.nn.MSELoss,
        num_replicas=2,
        batch_size=16,
        config={"lr": 0.1},
    )
    for _ in range(3):
        print("loss", trainer.train()["train_loss"])
    trainer.shutdown()
