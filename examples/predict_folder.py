"""Predicts the digit on each image of a folder, on two workers, and writes a table.

Data: `scans/*.png`. If the folder is missing, 360 of the 1,797 handwritten digits of scikit-learn are written there.
The model is trained on the other digits. Packages: scikit-learn, Pillow.
"""

import csv
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from sklearn.datasets import load_digits
from torch.utils.data import Dataset, TensorDataset

from raysgd import TorchTrainer
from raysgd.callbacks import Checkpointing
from raysgd.operators import ClassificationOperator

SCANS = Path("scans").resolve()  # on a cluster: a folder that every node can read


class Digits(ClassificationOperator):
    def build_model(self, config):
        return torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10))

    def build_data(self, config):
        pixels, digits = load_digits(return_X_y=True)
        return TensorDataset(torch.tensor(pixels[360:] / 16, dtype=torch.float32), torch.tensor(digits[360:]))

    def predict_batch(self, batch, batch_info):
        scores = super().predict_batch(batch, batch_info).softmax(1)
        return {"digit": scores.argmax(1), "confidence": scores.amax(1)}


class Scans(Dataset):
    def __init__(self):
        self.files = sorted(SCANS.glob("*.png"))

    def __len__(self):
        return len(self.files)

    def __getitem__(self, index):
        return torch.tensor(np.asarray(Image.open(self.files[index])), dtype=torch.float32).flatten() / 255


if not SCANS.exists():
    SCANS.mkdir()
    for number, image in enumerate(load_digits().images[:360]):
        Image.fromarray((image * 255 / 16).astype("uint8")).save(SCANS / f"{number:03d}.png")
scans = Scans()
config = {"lr": 0.003, "batch_size": 64, "seed": 0}
with TorchTrainer(training_operator_cls=Digits, config=config, num_workers=2, split_batches=True) as trainer:
    trainer.fit(10, callbacks=[Checkpointing("checkpoints")], resume_from="auto")  # a second run only loads the model
    found = trainer.predict(scans)  # one row for each image, in order
with open("predictions.csv", "w", newline="") as file:
    rows = zip((path.name for path in scans.files), found["digit"].tolist(), found["confidence"].tolist(), strict=True)
    csv.writer(file).writerows([("file", "digit", "confidence"), *rows])
print(f"{len(scans)} predictions are in predictions.csv")
