"""Trains a GAN that draws handwritten digits on two workers, and saves an image with 64 of them.

Data: the 1,797 handwritten digits of scikit-learn. Packages: scikit-learn, Pillow.
"""

import torch
from PIL import Image
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import TensorDataset

from raysgd import TorchTrainer
from raysgd.operators import GANOperator


class DigitsGAN(GANOperator):
    def build_generator(self, config):
        return nn.Sequential(
            nn.Linear(config["noise_dim"], 64 * 2 * 2, bias=False),
            nn.Unflatten(1, (64, 2, 2)),
            nn.BatchNorm2d(64),
            nn.ReLU(),
            nn.ConvTranspose2d(64, 32, kernel_size=4, stride=2, padding=1, bias=False),
            nn.BatchNorm2d(32),
            nn.ReLU(),
            nn.ConvTranspose2d(32, 1, kernel_size=4, stride=2, padding=1),
            nn.Tanh(),
        )

    def build_discriminator(self, config):
        return nn.Sequential(
            nn.Conv2d(1, 16, kernel_size=3, padding=1),
            nn.LeakyReLU(0.2),
            nn.Conv2d(16, 32, kernel_size=4, stride=2, padding=1),
            nn.LeakyReLU(0.2),
            nn.Flatten(),
            nn.Linear(32 * 4 * 4, 1),
        )

    def build_data(self, config):
        pixels = torch.tensor(load_digits().data / 8 - 1, dtype=torch.float32)  # from -1 to 1, like outputs of `Tanh`
        return TensorDataset(pixels.reshape(-1, 1, 8, 8))


config = {"noise_dim": 32, "lr": 0.001, "batch_size": 64, "seed": 0}  # 64 images per step, over all workers
with TorchTrainer(training_operator_cls=DigitsGAN, config=config, num_workers=2, split_batches=True) as trainer:
    history = trainer.fit(20)
    images = trainer.predict(torch.randn(64, 32))  # an image for each row of noise
print(history)
framed = nn.functional.pad(images, (1, 1, 1, 1), value=1.0)
sheet = framed.reshape(8, 8, 10, 10).transpose(1, 2).reshape(80, 80)  # eight rows of eight images
Image.fromarray(((sheet + 1) * 127.5).byte().numpy()).resize((480, 480)).save("digits.png")
print("the drawn digits are in digits.png")
