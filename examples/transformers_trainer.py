"""Fine-tunes with the `Trainer` of `transformers` on two workers. `fit()` starts it again if a worker dies.

`Trainer` stays unchanged: each worker runs the function. A callback reports metrics and checkpoints, and the function
resumes from the newest checkpoint. `HuggingFaceOperator` loses less: a step, as in `text_classification.py`.

Data: made here, two kinds of numbers. Model: a small BERT with random weights. Packages: the extra `hf`, accelerate.
"""

from pathlib import Path

import torch
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

from raysgd import train
from raysgd.train import FailureConfig, RunConfig, ScalingConfig
from raysgd.train.huggingface.transformers import RayTrainReportCallback, prepare_trainer
from raysgd.train.torch import TorchTrainer


def fine_tune():
    tokens = torch.randint(2, 100, (1152, 16), generator=torch.Generator().manual_seed(0))
    rows = [{"input_ids": row, "labels": int((row > 50).sum() > 8)} for row in tokens]  # are most of them large?
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
    arguments = TrainingArguments(
        output_dir=Path("out").resolve(),
        num_train_epochs=5,
        per_device_train_batch_size=16,  # for each worker
        learning_rate=0.003,
        eval_strategy="epoch",
        logging_strategy="epoch",
        save_strategy="epoch",
        report_to=[],
        use_cpu=not torch.cuda.is_available(),
    )
    trainer = Trainer(
        model=BertForSequenceClassification(BertConfig(vocab_size=100, **sizes)),
        args=arguments,
        train_dataset=rows[128:],
        eval_dataset=rows[:128],
        compute_metrics=lambda found: {"accuracy": float((found.predictions.argmax(1) == found.label_ids).mean())},
        callbacks=[RayTrainReportCallback()],
    )
    trainer = prepare_trainer(trainer)
    checkpoint = train.get_checkpoint()
    if checkpoint is None:
        trainer.train()
    else:
        with checkpoint.as_directory() as folder:
            trainer.train(resume_from_checkpoint=str(Path(folder, RayTrainReportCallback.CHECKPOINT_NAME)))


result = TorchTrainer(
    fine_tune,
    scaling_config=ScalingConfig(num_workers=2, use_gpu="auto"),
    run_config=RunConfig(storage_path=str(Path("results").resolve()), failure_config=FailureConfig(max_failures=3)),
).fit()
print(f"accuracy {result.metrics['eval_accuracy']:.3f}; the model is in {result.checkpoint.path}")
