"""Ray 2.7: a `transformers.Trainer` in the function of a `TorchTrainer`."""
# ray_train

import os

import ray
import ray.train.huggingface.transformers
import torch
import transformers
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer


class Pairs(torch.utils.data.Dataset):
    """Says whether the first of two tokens is the larger one."""

    def __len__(self):
        return 64

    def __getitem__(self, index):
        first, second = index % 8, index // 8
        return {"input_ids": torch.tensor([first, second]), "labels": torch.tensor(int(first > second))}


def loop(config):
    torch.manual_seed(0)
    model = transformers.BertForSequenceClassification(
        transformers.BertConfig(
            vocab_size=8, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16, num_labels=2
        )
    )
    arguments = transformers.TrainingArguments(
        output_dir=os.path.abspath("out"),
        num_train_epochs=4,
        per_device_train_batch_size=8,
        learning_rate=config["lr"],
        lr_scheduler_type="constant",
        logging_strategy="epoch",
        save_strategy="epoch",
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
    )
    trainer = transformers.Trainer(model=model, args=arguments, train_dataset=Pairs())
    trainer.add_callback(ray.train.huggingface.transformers.RayTrainReportCallback())
    trainer = ray.train.huggingface.transformers.prepare_trainer(trainer)
    trainer.train()


result = TorchTrainer(
    loop,
    train_loop_config={"lr": 1e-2},
    scaling_config=ScalingConfig(num_workers=2),
    run_config=RunConfig(storage_path=os.path.abspath("results")),
).fit()
for loss in result.metrics_dataframe["loss"]:
    print("loss", loss)
with result.checkpoint.as_directory() as folder:
    saved = os.path.join(folder, ray.train.huggingface.transformers.RayTrainReportCallback.CHECKPOINT_NAME)
    transformers.BertForSequenceClassification.from_pretrained(saved)
