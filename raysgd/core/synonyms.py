"""Maps options and callbacks of other libraries to their equivalents in raysgd, for error messages.

Users of `transformers.Trainer`, Lightning, Keras and accelerate try the names that they know. The result of
`instead_of` depends on where the option was passed: to an operator's trainer, to a training function's trainer, or to a
callback.
"""

from __future__ import annotations

from collections.abc import Mapping

TORCH, KERAS, FUNCTION = "TorchTrainer", "TFTrainer", "function"
EARLY_STOPPING, CHECKPOINTING = "EarlyStopping", "Checkpointing"
PLACES = (TORCH, KERAS, EARLY_STOPPING, CHECKPOINTING)
"""Names of the classes with advice of their own. `FUNCTION` stands for all trainers of training functions."""

_IN_FUNCTION = "write it in the function, as in a program for one process"
_NOT_THERE = "not there, omit it"
_EPOCHS = "`trainer.fit(5)` trains 5 epochs"
_STEPS = "`trainer.train(num_steps=100)` trains on 100 batches"
_LOADER = "write it in `setup`: `DataLoader(dataset, batch_size=32, shuffle=True, num_workers=2)` takes it"
_DATASET = "write it where the dataset is made: `dataset.shuffle(1000).batch(32)`, with the batches of all workers"
_BEST = 'pass `callbacks=[Checkpointing("checkpoints", metric="val_loss", restore_best_at_end=True)]` to `trainer.fit`'
_SAVING = 'pass `callbacks=[Checkpointing("checkpoints")]` to `trainer.fit`'
_KEEPING = 'pass `callbacks=[Checkpointing("checkpoints", keep_last=2)]` to `trainer.fit`'
_RULE = "pass `RunConfig(checkpoint_config=CheckpointConfig(num_to_keep=2))`, or `run(checkpoint_strategy=...)`"
_BEST_RULE = (
    'pass `RunConfig(checkpoint_config=CheckpointConfig(1, "val_loss", "min"))`, or `run(checkpoint_strategy=...)`'
)
_STOPPING = 'pass `callbacks=[EarlyStopping("val_loss", patience=3)]` to `trainer.fit`'
_FSDP = 'pass `strategy="fsdp"` to the trainer'
_PRECISION = 'pass `precision="bf16"`, or "fp16", to the trainer'
_SCHEDULE = (
    'write it in `setup`: `self.register(..., schedulers=scheduler)`, and pass `scheduler_step_freq="batch"` to the '
    "trainer"
)
_OPTIMIZER = 'pass `config={"lr": 0.001}`, and write in `setup`: `AdamW(model.parameters(), lr=config["lr"])`'
_OPTIMIZER_OF_KERAS = 'pass `config={"lr": 0.001}`, and write where you compile: `keras.optimizers.AdamW(config["lr"])`'
_OPERATORS_ONLY = "omit it, or pass it to `raysgd.torch.TorchTrainer`, with an operator"
_BOTH_OPERATORS = "omit it, or pass it to `raysgd.torch.TorchTrainer` or `raysgd.tf.TFTrainer`, with an operator"
_OF_FUNCTIONS = "it is for trainers of training functions, such as `raysgd.train.torch.TorchTrainer`"

_Row = tuple[str, ...]

# Each row has option names, then the advice for `TorchTrainer`, `TFTrainer` and training functions. If the second
# advice is missing, `TFTrainer` uses the first. If the third is missing, training functions use `_IN_FUNCTION`.
_TRAINERS: tuple[_Row, ...] = (
    ("epochs max_epochs num_epochs n_epochs num_train_epochs", _EPOCHS),
    ("max_steps", "`trainer.fit(max_steps=1000)` ends at that step", _STEPS),
    ("limit_train_batches steps_per_epoch", _STEPS),
    ("max_time", "`trainer.fit(5, max_time=3600)` ends it in time, and saves"),
    ("fast_dev_run", "`trainer.train(num_steps=1)` tries one batch"),
    (
        "gradient_accumulation_steps accumulation_steps accumulate_grad_batches",
        "pass `accumulate_grad_batches=4` to the trainer",
        "not there. A batch of the dataset is that of all workers, so it may be larger: `dataset.batch(256)`",
    ),
    (
        "max_grad_norm gradient_clip_val grad_clip clip_norm clipnorm clip_grad_norm",
        "pass `clip_grad_norm=1.0` to the trainer",
        "write it where the optimizer is made: `keras.optimizers.Adam(global_clipnorm=1.0)`",
    ),
    (
        "clip_grad_value clipvalue clip_value gradient_clip_algorithm",
        "pass `clip_grad_value=0.5` to the trainer",
        "write it where the optimizer is made: `keras.optimizers.Adam(clipvalue=0.5)`",
    ),
    (
        "bf16 fp16 amp use_amp mixed_precision precision use_fp16",
        _PRECISION,
        'write where the model is made: `keras.mixed_precision.set_global_policy("mixed_bfloat16")`',
        "call `raysgd.train.torch.accelerate(amp=True)` in the function",
    ),
    ("gradient_checkpointing", "pass `activation_checkpointing=True` to the trainer", _NOT_THERE),
    (
        "torch_compile torch_compile_backend torch_compile_mode jit_compile",
        "pass `compile=True` to the trainer",
        _NOT_THERE,
    ),
    (
        "class_weight class_weights pos_weight",
        "write it in `setup`: `self.register(..., criterion=torch.nn.CrossEntropyLoss(weight=weights))`",
        'pass `config={"fit_config": {"class_weight": {0: 1.0, 1: 2.0}}}`',
    ),
    (
        "label_smoothing label_smoothing_factor",
        "write it in `setup`: `self.register(..., criterion=torch.nn.CrossEntropyLoss(label_smoothing=0.1))`",
        "write it where you compile: `keras.losses.CategoricalCrossentropy(label_smoothing=0.1)`",
    ),
    (
        "learning_rate lr optim optimizer optimizers weight_decay momentum adam_beta1 adam_beta2 adam_epsilon",
        _OPTIMIZER,
        _OPTIMIZER_OF_KERAS,
    ),
    (
        "lr_scheduler_type lr_scheduler lr_scheduler_kwargs scheduler schedulers warmup_ratio warmup_steps",
        _SCHEDULE,
        "write it where the optimizer is made: `SGD(keras.optimizers.schedules.CosineDecay(0.1, 1000))`",
    ),
    ("per_device_train_batch_size per_device_eval_batch_size train_batch_size batch_size", _LOADER, _DATASET),
    (
        "shuffle drop_last pin_memory collate_fn data_collator dataloader_num_workers dataloader_drop_last "
        "dataloader_pin_memory dataloader_persistent_workers dataloader_prefetch_factor",
        _LOADER,
        _DATASET,
    ),
    ("use_distributed_sampler", "pass `add_dist_sampler=False` to the trainer", _NOT_THERE),
    (
        "overfit_batches",
        "pass it to `trainer.fit(5, dataset=loader)`, with a loader of few samples",
        "write it in `data_creator`: `return dataset.take(2), test_dataset`",
    ),
    (
        "train_dataset eval_dataset train_dataloader train_dataloaders val_dataloaders train_loader val_loader "
        "datamodule train_data val_data validation_data x y",
        "write it in `setup`: `self.register_data(train_loader=loader, validation_loader=another)`",
        "return it from `data_creator`: `return train_dataset, test_dataset`",
    ),
    (
        "validation_split",
        "write it in `setup`: `torch.utils.data.random_split(dataset, [0.9, 0.1])`",
        "write it in `data_creator`: `return dataset.skip(10), dataset.take(10)`",
    ),
    (
        "model models module loss loss_fn criterion",
        "write it in `setup`: `self.register(models=model, optimizers=optimizer, criterion=loss)`",
        "return the compiled model from `model_creator`",
    ),
    (
        "metrics compute_metrics",
        "return them from `validate_batch`: `{**super().validate_batch(batch, batch_info), ...}`",
        "write it where you compile: `model.compile(..., metrics=[...])`",
    ),
    (
        "devices gpus num_gpus n_gpu n_gpus world_size nproc_per_node num_processes num_nodes",
        "pass `num_workers=4` to the trainer",
        "pass `num_workers=4` to the trainer",
        "pass `num_workers=4`, in `scaling_config=ScalingConfig(...)` where the trainer has that",
    ),
    (
        "accelerator device use_cuda gpu",
        "pass `use_gpu=True` to the trainer",
        "pass `use_gpu=True` to the trainer",
        "pass `use_gpu=True`, in `scaling_config=ScalingConfig(...)` where the trainer has that",
    ),
    (
        "find_unused_parameters ddp_find_unused_parameters",
        'write it in `setup`: `self.register(..., ddp_args={"find_unused_parameters": True})`',
        _NOT_THERE,
        'write it in the function: `prepare_model(model, ddp_kwargs={"find_unused_parameters": True})`',
    ),
    (
        "ddp_bucket_cap_mb ddp_broadcast_buffers ddp_static_graph",
        'write it in `setup`: `self.register(..., ddp_args={"bucket_cap_mb": 50})`',
        _NOT_THERE,
        'write it in the function: `prepare_model(model, ddp_kwargs={"bucket_cap_mb": 50})`',
    ),
    ("fsdp fsdp_config deepspeed", _FSDP, _NOT_THERE),
    (
        "callbacks",
        "pass it to `trainer.fit(5, callbacks=[...])`",
        "pass it to `trainer.fit(5, callbacks=[...])`",
        "pass it to `trainer.run(function, callbacks=[...])`, or `RunConfig(callbacks=[...])`",
    ),
    ("patience early_stopping early_stopping_patience", _STOPPING),
    (
        "monitor metric_for_best_model load_best_model_at_end greater_is_better restore_best_weights",
        _BEST,
        _BEST,
        _BEST_RULE,
    ),
    (
        "save_steps save_freq",
        'pass `callbacks=[Checkpointing("checkpoints", every_n_steps=1000)]` to `trainer.fit`',
        "call `trainer.train(num_steps=1000)` and `trainer.save` in a loop",
        "write it in the function: `report(metrics, checkpoint=...)`",
    ),
    (
        "save_only_model",
        'call `trainer.save("model.safetensors", format="safetensors")`, which writes the weights alone',
        'call `trainer.get_model().save("model.keras")`',
    ),
    (
        "save_strategy enable_checkpointing checkpoint_dir",
        _SAVING,
        _SAVING,
        "write it in the function: `report(metrics, checkpoint=...)`",
    ),
    ("save_top_k save_total_limit", _KEEPING, _KEEPING, _RULE),
    (
        "output_dir default_root_dir logging_dir save_dir",
        'pass it to `trainer.fit(5, folder="run")`',
        'pass it to `trainer.fit(5, folder="run")`',
        'pass `run_config=RunConfig(storage_path="/data/runs")`, or `Trainer(..., logdir="runs")`',
    ),
    (
        "logging_steps logging_strategy logging_first_step log_every_n_steps every_n_steps",
        "pass it to `trainer.fit(5, log_every_n_steps=50)`",
        "not there: results are those of epochs",
        "write it in the function: `report(metrics)` as often as you like",
    ),
    ("logger report_to", 'pass `callbacks=[TensorBoardLogger("logs")]` to `trainer.fit`'),
    (
        "eval_steps val_check_interval",
        "pass it to `trainer.fit(5, validate_every_n_steps=500)`",
        "call `trainer.train(num_steps=500)` and `trainer.validate()` in a loop",
    ),
    ("limit_val_batches num_sanity_val_steps", "`trainer.validate(num_steps=10)` validates on 10 batches"),
    (
        "eval_strategy evaluation_strategy check_val_every_n_epoch",
        "`trainer.fit(5, validation_freq=2)` validates after every second epoch",
    ),
    (
        "resume_from_checkpoint ckpt_path",
        'pass it to `trainer.fit(5, resume_from="checkpoints/epoch_0005.ckpt")`',
        'pass it to `trainer.fit(5, resume_from="checkpoints/epoch_0005.ckpt")`',
        "pass `resume_from_checkpoint=checkpoint` where the trainer has that, or `run(f, checkpoint=checkpoint)`",
    ),
    ("verbose enable_progress_bar disable_tqdm", "pass it to `trainer.fit(5, progress=True)`"),
    ("profiler", "call `trainer.train(profile=True)`"),
    (
        "benchmark detect_anomaly tf32",
        "set it in a function of your own, and pass `initialization_hook=function` to the trainer",
        "set it in a function of your own, and pass `initialization_hook=function` to the trainer",
    ),
    (
        "seed data_seed full_determinism",
        "pass `seed=1` to the trainer",
        "pass `seed=1` to the trainer",
        "write it in the function: `raysgd.train.torch.enable_reproducibility(1)`",
    ),
    ("backend", "pass it to the trainer", "omit it, the workers are connected over sockets of their own"),
    (
        "ddp_backend",
        'pass `backend="gloo"` to the trainer',
        "omit it, the workers are connected over sockets of their own",
    ),
    ("ddp_timeout", "pass `timeout_s=1800` to the trainer", "pass `timeout_s=1800` to the trainer"),
    ("use_cpu", "pass `use_gpu=False` to the trainer", "pass `use_gpu=False` to the trainer"),
    ("validation_workers", "spare workers validate as well, pass `spare_workers=1`"),
    (
        "validation_config",
        "pass `validation_freq` to `trainer.fit`",
        "pass `validation_freq` to `trainer.fit`",
        "validate in the function before `report`, and report what you find with the checkpoint",
    ),
    ("split_batches", _BOTH_OPERATORS, _BOTH_OPERATORS, _BOTH_OPERATORS),
    ("micro_batch_size deterministic", _OPERATORS_ONLY, _OPERATORS_ONLY, _OPERATORS_ONLY),
    (
        "train_loop_per_worker train_loop_config scaling_config run_config",
        _OF_FUNCTIONS,
        _OF_FUNCTIONS,
        "`Trainer` is made with `num_workers` and `use_gpu`, and its `run` gets the function and its config",
    ),
)

_OTHERS: Mapping[str, tuple[_Row, ...]] = {
    EARLY_STOPPING: (
        ("monitor metric_name", 'write `EarlyStopping("val_loss")`'),
        ("restore_best_weights restore_best load_best", _BEST),
        ("baseline stopping_threshold", "write `threshold=0.1`"),
        ("early_stopping_patience", "write `patience=3`"),
        ("early_stopping_threshold tolerance", "write `min_delta=0.01`"),
        ("verbose strict", "omit it; `history.stop_reason` says why a run has stopped"),
        ("start_from_epoch divergence_threshold", _NOT_THERE),
    ),
    CHECKPOINTING: (
        ("monitor metric_name save_best_only", 'write `metric="val_loss"`; the best file stays beside the newest'),
        ("save_top_k", 'write `metric="val_loss", keep_best=3`'),
        ("save_total_limit num_to_keep max_to_keep n_saved save_last", "write `keep_last=2`"),
        ("dirpath dirname filepath filename output_dir save_dir path", 'write `Checkpointing("checkpoints")`'),
        ("period save_interval", "write `every_n_epochs=2`"),
        ("every_n_train_steps save_steps save_freq", "write `every_n_steps=1000`"),
        ("train_time_interval", "write `every_minutes=15`"),
        ("restore_best_weights load_best_model_at_end", 'write `metric="val_loss", restore_best_at_end=True`'),
        ("save_weights_only save_only_model verbose", _NOT_THERE),
    ),
}
_COLUMNS = {KERAS: 1, FUNCTION: 2}


_CALLBACKS = (
    ("EarlyStopping EarlyStoppingCallback", 'EarlyStopping("val_loss")'),
    ("ModelCheckpoint BackupAndRestore", 'Checkpointing("checkpoints")'),
    ("TensorBoard TensorBoardCallback TensorBoardLogger", 'TensorBoardLogger("logs")'),
    ("CSVLogger", "CSVLogger()"),
    ("WandbCallback WandbMetricsLogger WandbLogger", "WandbLogger()"),
    ("MLflowCallback MLFlowLogger", "MLflowLogger()"),
    ("CometLogger", "CometLogger()"),
    ("LearningRateMonitor", "LearningRateMonitor()"),
    ("StochasticWeightAveraging", "SWA()"),
    ("EMAWeightAveraging SwapEMAWeights", "EMA()"),
    ("TQDMProgressBar RichProgressBar ProgbarLogger ProgressCallback", "ProgressBar()"),
)
"""Callback names of other libraries, and the equivalent callback of `raysgd.callbacks`."""


def callback_instead_of(callback: object) -> str:
    """Return one or two sentences about what to use instead of another library's callback, with a leading space.

    Return an empty string for all other objects.

    Examples:
        >>> EarlyStopping = type("EarlyStopping", (), {"__module__": "lightning.pytorch.callbacks"})
        >>> callback_instead_of(EarlyStopping())
        ' Write `raysgd.callbacks.EarlyStopping("val_loss")`.'
    """
    kind = callback if isinstance(callback, type) else type(callback)
    libraries = {base.__module__.partition(".")[0] for base in kind.__mro__}
    names = {base.__name__ for base in kind.__mro__}
    if not libraries & {"keras", "tf_keras", "lightning", "pytorch_lightning", "transformers", "accelerate"}:
        return ""
    ours = next((ours for theirs, ours in _CALLBACKS if names & set(theirs.split())), None)
    line = f" Write `raysgd.callbacks.{ours}`." if ours else ""
    if libraries & {"keras", "tf_keras"}:
        line += ' Keras\'s own belong to the `fit` of Keras: `config={"fit_config": {"callbacks": [...]}}`.'
    return line or " Write what it does in a subclass of one of these, such as in `on_result(self, run, result)`."


def instead_of(name: str, place: str) -> str | None:
    """Return advice on what to write instead of another library's option. Return None for unknown options.

    The advice completes a sentence in an error message.

    Args:
        name: Name of the option.
        place: Where the option was passed: `TORCH`, `KERAS`, `FUNCTION`, `EARLY_STOPPING` or `CHECKPOINTING`.

    Examples:
        >>> instead_of("gradient_clip_val", TORCH)
        'pass `clip_grad_norm=1.0` to the trainer'
        >>> instead_of("save_top_k", CHECKPOINTING), instead_of("banana", TORCH)
        ('write `metric="val_loss", keep_best=3`', None)
    """
    for names, *lines in _OTHERS.get(place, _TRAINERS):
        if name in names.split():
            return [*lines, *[lines[0], _IN_FUNCTION][len(lines) - 1 :]][_COLUMNS.get(place, 0)]
    return None
