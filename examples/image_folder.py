"""Trains a torchvision network on a folder of images, with augmentation, on two workers. Keeps the best checkpoint.

Data: PNGs in `photos/train/CLASS` and `photos/validation/CLASS`. If the folder is missing, 800 pieces of two photos of
scikit-learn are written there. Packages: torchvision, scikit-learn.
"""

from pathlib import Path

import numpy as np
import torch
from PIL import Image
from sklearn.datasets import load_sample_images
from torchvision import datasets, models, transforms

from raysgd import TorchTrainer
from raysgd.callbacks import Checkpointing
from raysgd.operators import ClassificationOperator

PHOTOS = Path("photos").resolve()  # on a cluster: a folder that every node can read


class Photos(ClassificationOperator):
    def build_model(self, config):
        num_classes = len(list((PHOTOS / "train").iterdir()))
        return models.shufflenet_v2_x1_0(num_classes=num_classes)  # or `models.resnet50`

    def build_data(self, config):
        crop, flip = transforms.RandomResizedCrop(32, scale=(0.4, 1)), transforms.RandomHorizontalFlip()
        color, to_tensor = transforms.ColorJitter(0.4, 0.4, 0.4), transforms.ToTensor()
        train = datasets.ImageFolder(PHOTOS / "train", transforms.Compose([crop, flip, color, to_tensor]))
        plain = transforms.Compose([transforms.CenterCrop(32), to_tensor])
        return train, datasets.ImageFolder(PHOTOS / "validation", plain)


def cut_photos():
    """Cut pieces from two areas: training images from the left part, validation images from the right part."""
    china, flower = load_sample_images().images
    areas = {"leaves": flower[:, 450:], "petals": flower[100:340, 195:425], "sky": china[:190, 330:560]}
    areas |= {"temple": china[130:400, 100:320], "trees": china[300:, 340:]}
    random = np.random.default_rng(0)
    for name, area in areas.items():
        left, right = np.array_split(area, [area.shape[1] * 6 // 10], axis=1)
        for part, source, num_pieces in (("train", left, 120), ("validation", right, 40)):
            (PHOTOS / part / name).mkdir(parents=True)
            for number in range(num_pieces):
                row, column = random.integers(0, np.subtract(source.shape[:2], 40))
                piece = Image.fromarray(source[row : row + 40, column : column + 40])
                piece.save(PHOTOS / part / name / f"{number}.png")


if not PHOTOS.exists():
    cut_photos()
config = {"lr": 0.001, "batch_size": 32, "seed": 0}  # 32 images per step, over all workers
saving = Checkpointing("checkpoints", metric="val_accuracy", restore_best_at_end=True)
with TorchTrainer(training_operator_cls=Photos, config=config, num_workers=2, split_batches=True) as trainer:
    print(trainer.fit(6, callbacks=[saving]))
    torch.save(trainer.get_model(to_cpu=True).state_dict(), "photos.pt")  # the best checkpoint, not the last
print(f"accuracy {saving.best_score:.3f}; the model is in photos.pt")
