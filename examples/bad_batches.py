"""Trains on data with broken samples: `Guard` leaves their steps out on all workers, and `why` names the samples.

Data: 1,797 images of digits from scikit-learn. One has NaN instead of pixels, and one is 10,000 times too bright.
Packages: scikit-learn.
"""

import torch
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, TensorDataset

from raysgd import TorchTrainer, TrainingOperator
from raysgd.callbacks import Guard
from raysgd.replay import find_jumps, why

NAN, BRIGHT = 700, 1301


class Digits(TrainingOperator):
    def setup(self, config):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))
        self.model, self.optimizer, self.criterion = self.register(
            models=model,
            optimizers=torch.optim.Adam(model.parameters(), lr=0.01),
            criterion=torch.nn.CrossEntropyLoss(),
        )
        images, digits = load_digits(return_X_y=True)
        pixels, digits = torch.tensor(images / 16).float(), torch.tensor(digits)
        pixels[NAN], pixels[BRIGHT] = torch.nan, 10_000 * pixels[BRIGHT]
        self.register_data(
            train_loader=DataLoader(TensorDataset(pixels[:1440], digits[:1440]), batch_size=16),
            validation_loader=DataLoader(TensorDataset(pixels[1440:], digits[1440:]), batch_size=64),
        )


def main():
    with TorchTrainer(training_operator_cls=Digits, num_workers=2, split_batches=True) as trainer:
        history = trainer.fit(10, callbacks=[Guard(spike=20)], folder="bad_batches")
    left_out = [each.step for each in find_jumps(history).left_out]
    print(f"accuracy {history[-1]['val_accuracy']:.3f}, {len(left_out)} steps left out")
    print(why(history, left_out[0]))


if __name__ == "__main__":
    main()
