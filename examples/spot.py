"""Trains on machines that may disappear, such as spot instances. Kill it, start it again, and it continues.

If a worker is lost, the other worker continues with the next step, and a new worker joins later. If the program
itself is lost, start it again: it resumes from the newest checkpoint. To test the loss of a worker, use
`raysgd.testing.kill_worker`.

Data: the 1,797 handwritten digits of scikit-learn. Packages: scikit-learn.
"""

import torch
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, TensorDataset, random_split

from raysgd import TorchTrainer, TrainingOperator
from raysgd.callbacks import Checkpointing

CHECKPOINTS = "checkpoints"  # on spot machines: a store that outlives them, such as `s3://bucket/run`


class Digits(TrainingOperator):
    def setup(self, config):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10))
        self.model, self.optimizer, self.criterion = self.register(
            models=model,
            optimizers=torch.optim.Adam(model.parameters(), lr=config["lr"]),
            criterion=torch.nn.CrossEntropyLoss(),
        )
        pixels, digits = load_digits(return_X_y=True)
        data = TensorDataset(torch.tensor(pixels / 16, dtype=torch.float32), torch.tensor(digits))
        train, validation = random_split(data, [1440, 357], generator=torch.Generator().manual_seed(0))
        self.register_data(
            train_loader=DataLoader(train, 32, shuffle=True), validation_loader=DataLoader(validation, 32)
        )


# `split_batches=True` keeps each step at 32 samples, so fewer workers can continue alone.
with TorchTrainer(training_operator_cls=Digits, config={"lr": 0.001}, num_workers=2, split_batches=True) as trainer:
    history = trainer.fit(
        20,  # in total, no matter how often the program starts
        callbacks=[Checkpointing(CHECKPOINTS, keep_last=2)],
        resume_from="auto",
        progress=True,  # prints a line for each epoch and each failure, also into a log file
    )
    torch.save(trainer.get_model(to_cpu=True).state_dict(), "digits.pt")
print(f"{len(history)} epochs, {sum(event.is_failure for event in history.events)} failures; the model is in digits.pt")
