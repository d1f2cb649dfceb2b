"""Ray 2.7: a Lightning `Trainer` in the function of a `TorchTrainer`."""
# ray_train

import lightning.pytorch as pl
import ray.train.lightning
import torch
from ray.train import CheckpointConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer


class Line(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        torch.nn.init.zeros_(self.layer.weight)

    def training_step(self, batch, index):
        x, y = batch
        loss = ((self.layer(x) - y) ** 2).mean()
        self.log("loss", loss, on_step=False, on_epoch=True, sync_dist=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.2)


def loop():
    x = torch.linspace(-1, 1, 64).reshape(-1, 1)
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, 2 * x), batch_size=8)
    trainer = pl.Trainer(
        max_epochs=3,
        accelerator="cpu",
        devices="auto",
        strategy=ray.train.lightning.RayDDPStrategy(),
        plugins=[ray.train.lightning.RayLightningEnvironment()],
        callbacks=[ray.train.lightning.RayTrainReportCallback()],
        enable_progress_bar=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        logger=False,
    )
    trainer = ray.train.lightning.prepare_trainer(trainer)
    checkpoint = ray.train.get_checkpoint()
    if checkpoint:
        with checkpoint.as_directory() as folder:
            trainer.fit(Line(), loader, ckpt_path=f"{folder}/checkpoint.ckpt")
    else:
        trainer.fit(Line(), loader)


result = TorchTrainer(
    loop,
    scaling_config=ScalingConfig(num_workers=2),
    run_config=RunConfig(storage_path="results", checkpoint_config=CheckpointConfig(num_to_keep=1)),
).fit()
for loss in result.metrics_dataframe["loss"]:
    print("loss", loss)
assert result.metrics["epoch"] == 2
with result.checkpoint.as_directory() as folder:
    assert Line.load_from_checkpoint(f"{folder}/checkpoint.ckpt").layer.weight.item() > 1
