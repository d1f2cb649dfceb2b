"""Trains a GAN that draws handwritten digits on two workers, and saves an image with 64 of them.

Both networks have names of their own, and each has an optimizer. If a worker dies, the others undo the step and repeat
it.

Data: the 1,797 handwritten digits of scikit-learn. Packages: scikit-learn, Pillow.
"""

import torch
from PIL import Image
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from raysgd import TorchTrainer, TrainingOperator


class GAN(TrainingOperator):
    def setup(self, config):
        torch.manual_seed(0)
        generator = nn.Sequential(
            nn.Linear(32, 64 * 2 * 2, bias=False),
            nn.Unflatten(1, (64, 2, 2)),
            nn.BatchNorm2d(64),
            nn.ReLU(),
            nn.ConvTranspose2d(64, 32, kernel_size=4, stride=2, padding=1, bias=False),
            nn.BatchNorm2d(32),
            nn.ReLU(),
            nn.ConvTranspose2d(32, 1, kernel_size=4, stride=2, padding=1),
            nn.Tanh(),
        )
        discriminator = nn.Sequential(
            nn.Conv2d(1, 16, kernel_size=3, padding=1),
            nn.LeakyReLU(0.2),
            nn.Conv2d(16, 32, kernel_size=4, stride=2, padding=1),
            nn.LeakyReLU(0.2),
            nn.Flatten(),
            nn.Linear(32 * 4 * 4, 1),
        )
        models = generator, discriminator
        adams = [torch.optim.Adam(each.parameters(), lr=config["lr"], betas=(0.5, 0.999)) for each in models]
        (self.generator, self.discriminator), (self.adam_g, self.adam_d), self.criterion = self.register(
            models=models, optimizers=adams, criterion=nn.BCEWithLogitsLoss()
        )
        pixels = torch.tensor(load_digits().data / 8 - 1, dtype=torch.float32)  # from -1 to 1, like outputs of `Tanh`
        self.register_data(train_loader=DataLoader(TensorDataset(pixels.reshape(-1, 1, 8, 8)), 64, shuffle=True))

    def train_batch(self, batch, batch_info):
        real = batch[0].to(self.device)
        fake = self.generator(torch.randn(len(real), 32, device=self.device))
        loss_d = self.loss(real, 1) + self.loss(fake.detach(), 0)
        self.backward(loss_d, optimizer=self.adam_d)
        self.optimizer_step(self.adam_d)
        self.discriminator.requires_grad_(False)  # the generator's loss leaves no gradients in the discriminator
        loss_g = self.loss(fake, 1)
        self.backward(loss_g, optimizer=self.adam_g)
        self.optimizer_step(self.adam_g)
        self.discriminator.requires_grad_(True)
        return {"loss_d": loss_d.detach(), "loss_g": loss_g.detach(), "num_samples": len(real)}

    def loss(self, images, is_real):
        logits = self.discriminator(images)
        return self.criterion(logits, torch.full_like(logits, is_real))

    def predict_batch(self, batch, batch_info):
        return self.generator(batch.to(self.device))


with TorchTrainer(training_operator_cls=GAN, config={"lr": 0.001}, num_workers=2, split_batches=True) as trainer:
    history = trainer.fit(20)
    images = trainer.predict(torch.randn(64, 32))  # an image for each row of noise
print(history)
framed = nn.functional.pad(images, (1, 1, 1, 1), value=1.0)
sheet = framed.reshape(8, 8, 10, 10).transpose(1, 2).reshape(80, 80)  # eight rows of eight images
Image.fromarray(((sheet + 1) * 127.5).byte().numpy()).resize((480, 480)).save("digits.png")
print("the drawn digits are in digits.png")
