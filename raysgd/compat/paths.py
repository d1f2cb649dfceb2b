"""Contains the table of the old library's names: for each, its current name in raysgd, or why it has none.

The old library is `ray.util.sgd`, together with the former `ray.train` and `ray.air`. `raysgd migrate`
uses this table to rewrite programs, and `raysgd.compat.install` uses it to redirect their imports. The tables in
`docs/migration.md` are made from it, too.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from typing import Literal

Group = Literal["sgd", "train"]
"""A group of old names: "train" for names of the former `ray.train` and `ray.air`, "sgd" for all others.

`raysgd migrate` changes names of the group "train" only if the user passes `--ray-train`, because many of them have
another meaning in current Ray.
"""

_SESSION_A = "get_dataset_shard load_checkpoint local_rank report save_checkpoint world_rank world_size"
_CONFIGS = "CheckpointConfig FailureConfig RunConfig ScalingConfig"
_STRATEGY = "BackendConfig CheckpointStrategy TrainingCallback TrainingIterator Trainer"
_V2 = (
    "BackendConfig CheckpointStrategy HorovodConfig SGDCallback SGDIterator TensorflowConfig TorchConfig Trainer "
    "TrainingCallback TrainingIterator " + _SESSION_A
)
_WORKER_GROUP = "Worker WorkerGroup WorkerMetadata"
_LOGGERS = "JsonLoggerCallback TBXLoggerCallback MLflowLoggerCallback PrintCallback TorchTensorboardProfilerCallback"
_TORCH = (
    "TorchConfig accelerate backward enable_reproducibility get_device get_devices prepare_data_loader prepare_model "
    "prepare_optimizer TorchWorkerProfiler"
)
_SESSION_C = (
    "get_checkpoint get_dataset_shard get_experiment_name get_local_rank get_local_world_size get_metadata "
    "get_node_rank get_trial_dir get_trial_id get_trial_name get_trial_resources get_world_rank get_world_size report"
)
_PREPROCESSORS = (
    "Categorizer Chain Concatenator CountVectorizer FeatureHasher HashingVectorizer LabelEncoder MaxAbsScaler "
    "MinMaxScaler MultiHotEncoder Normalizer OneHotEncoder OrdinalEncoder PowerTransformer RobustScaler SimpleImputer "
    "StandardScaler Tokenizer"
)
_SAMPLE = (
    "Categorical Domain Float Function Integer LogUniform Normal Quantized Sampler Uniform choice lograndint "
    "loguniform qlograndint qloguniform qrandint qrandn quniform randint randn sample_from uniform"
)
_FIRST_CONSTANTS = "SCHEDULER_STEP SCHEDULER_STEP_BATCH SCHEDULER_STEP_EPOCH USE_FP16"
_CONSTANTS = (
    "BASIC_AUTOFILLED_KEYS DEFAULT_RESULTS_DIR DETAILED_AUTOFILLED_KEYS ENABLE_DETAILED_AUTOFILLED_METRICS_ENV "
    "ENABLE_SHARE_CUDA_VISIBLE_DEVICES_ENV TIME_THIS_ITER_S TIMESTAMP TRAINING_ITERATION RESULT_FILE_JSON "
    "RESULT_FETCH_TIMEOUT TUNE_CHECKPOINT_FILE_NAME TUNE_CHECKPOINT_ID DATE HOSTNAME NODE_IP PID TIME_TOTAL_S"
)
_EXECUTOR = "Backend BackendConfig BackendExecutor InactiveWorkerGroupError TrainingWorkerError"

_DCGAN = "Discriminator GANOperator Generator model_creator optimizer_creator train_example"
_FASHION = "NeuralNetwork train_fashion_mnist train_func"

_SGD: dict[str, tuple[str, str]] = {
    "ray.util.sgd": ("raysgd", "TorchTrainer TFTrainer"),
    "ray.util.sgd.pytorch": ("raysgd.torch", "TrainingOperator"),
    "ray.util.sgd.pytorch.pytorch_trainer": ("raysgd.torch.torch_trainer", ""),
    "ray.util.sgd.pytorch.training_operator": ("raysgd.torch.training_operator", "TrainingOperator"),
    "ray.util.sgd.pytorch.constants": ("raysgd.torch.constants", _FIRST_CONSTANTS),
    "ray.util.sgd.pytorch.utils": ("raysgd.torch.constants", _FIRST_CONSTANTS),
    "ray.util.sgd.pytorch.examples.train_example": (
        "raysgd.torch.examples.train_example",
        "LinearDataset data_creator model_creator optimizer_creator scheduler_creator train_example",
    ),
    "ray.util.sgd.pytorch.examples.cifar_pytorch_example": (
        "raysgd.torch.examples.cifar_pytorch_example",
        "initialization_hook train_cifar",
    ),
    "ray.util.sgd.pytorch.examples.dcgan": ("raysgd.torch.examples.dcgan", _DCGAN),
    "ray.util.sgd.torch": ("raysgd.torch", "BaseTorchTrainable CreatorOperator TorchTrainer TrainingOperator"),
    "ray.util.sgd.torch.torch_trainer": ("raysgd.torch.torch_trainer", "BaseTorchTrainable TorchTrainer"),
    "ray.util.sgd.torch.training_operator": (
        "raysgd.torch.training_operator",
        "CreatorOperator TrainingOperator get_test_metrics_operator get_test_operator",
    ),
    "ray.util.sgd.torch.lightning_operator": ("raysgd.torch.lightning_operator", "LightningOperator"),
    "ray.util.sgd.torch.constants": (
        "raysgd.torch.constants",
        "NCCL_TIMEOUT_S NUM_STEPS SCHEDULER_STEP SCHEDULER_STEP_BATCH SCHEDULER_STEP_EPOCH SCHEDULER_STEP_MANUAL "
        "SGD_PLACEMENT_GROUP_TIMEOUT_S USE_FP16 VALID_SCHEDULER_STEP",
    ),
    "ray.util.sgd.torch.utils": ("raysgd.torch.utils", "choose_amp_backend setup_address setup_process_group"),
    "ray.util.sgd.torch.torch_dataset": ("raysgd.torch.torch_dataset", "TorchMLDataset"),
    "ray.util.sgd.torch.resnet": (
        "raysgd.torch.resnet",
        "BasicBlock Bottleneck ResNet ResNet18 ResNet34 ResNet50 ResNet101 ResNet152",
    ),
    "ray.util.sgd.torch.func_trainable": ("raysgd.torch.func_trainable", "DistributedTrainableCreator"),
    "ray.util.sgd.torch.examples": ("raysgd.torch.examples", ""),
    "ray.util.sgd.torch.examples.train_example": (
        "raysgd.torch.examples.train_example",
        "LinearDataset data_creator model_creator optimizer_creator scheduler_creator train_example",
    ),
    "ray.util.sgd.torch.examples.tune_example": (
        "raysgd.torch.examples.tune_example",
        "get_custom_training_operator tune_example tune_example_manual",
    ),
    "ray.util.sgd.torch.examples.dcgan": ("raysgd.torch.examples.dcgan", _DCGAN),
    "ray.util.sgd.torch.examples.cifar_pytorch_example": (
        "raysgd.torch.examples.cifar_pytorch_example",
        "CifarTrainingOperator initialization_hook train_cifar",
    ),
    "ray.util.sgd.tf": ("raysgd.tf", "TFTrainable TFTrainer"),
    "ray.util.sgd.tf.tf_trainer": ("raysgd.tf.tf_trainer", "TFTrainable TFTrainer"),
    "ray.util.sgd.tf.tf_dataset": ("raysgd.tf.tf_dataset", "TFMLDataset"),
    "ray.util.sgd.tf.examples": ("raysgd.tf.examples", ""),
    "ray.util.sgd.tf.examples.tensorflow_train_example": (
        "raysgd.tf.examples.tensorflow_train_example",
        "create_config simple_dataset simple_model train_example tune_example",
    ),
    "ray.util.sgd.tf.examples.cifar_tf_example": ("raysgd.tf.examples.cifar_tf_example", "main"),
    "ray.util.sgd.data": ("raysgd.data", "Dataset"),
    "ray.util.sgd.data.dataset": ("raysgd.data.dataset", "Dataset"),
    "ray.util.sgd.data.examples.mlp_identity": (
        "raysgd.data.examples.mlp_identity",
        "Net dataset_creator model_creator optimizer_creator to_mat",
    ),
    "ray.util.sgd.utils": (
        "raysgd.utils",
        "AverageMeter AverageMeterCollection BATCH_COUNT BATCH_SIZE NUM_SAMPLES TimerCollection TimerStat "
        "check_for_failure find_free_port override",
    ),
    "ray.util.data": ("raysgd.util.data", "MLDataset from_parallel_iter"),
    "ray.util.data.dataset": ("raysgd.util.data", "MLDataset"),
    "ray.util.data.examples": ("raysgd.data.examples", ""),
    "ray.util.data.examples.mlp_identity_torch": (
        "raysgd.data.examples.mlp_identity_torch",
        "Net main make_train_operator",
    ),
    "ray.util.data.examples.mlp_identity_tf": (
        "raysgd.data.examples.mlp_identity_tf",
        "main make_data_creator model_creator",
    ),
    "ray.tune.integration.torch": (
        "raysgd.tune.torch",
        "DistributedTrainableCreator distributed_checkpoint_dir is_distributed_trainable",
    ),
    "ray.tune.integration.tensorflow": (
        "raysgd.tune.tensorflow",
        "DistributedTrainableCreator distributed_checkpoint_dir get_num_workers",
    ),
    "ray.util.sgd.v2": ("raysgd.v2", _V2),
    "ray.util.sgd.v2.trainer": ("raysgd.v2.trainer", "SGDIterator SGDWorkerGroup Trainer"),
    "ray.util.sgd.v2.callbacks": ("raysgd.v2.callbacks", "SGDCallback JsonLoggerCallback TBXLoggerCallback"),
    "ray.util.sgd.v2.callbacks.callback": ("raysgd.v2.callbacks", "SGDCallback"),
    "ray.util.sgd.v2.callbacks.logging": (
        "raysgd.train.callbacks.logging",
        "JsonLoggerCallback TBXLoggerCallback",
    ),
    "ray.util.sgd.v2.session": ("raysgd.train.session", f"{_SESSION_A} TrainingResultType"),
    "ray.util.sgd.v2.checkpoint": ("raysgd.train.checkpoint", "CheckpointStrategy"),
    "ray.util.sgd.v2.constants": ("raysgd.train.constants", _CONSTANTS),
    "ray.util.sgd.v2.worker_group": ("raysgd.train.worker_group", _WORKER_GROUP),
    "ray.util.sgd.v2.backends": ("raysgd.v2", "BackendConfig HorovodConfig TensorflowConfig TorchConfig"),
    "ray.util.sgd.v2.backends.backend": ("raysgd.train.backend", f"{_EXECUTOR} CheckpointManager SGDBackendError"),
    "ray.util.sgd.v2.backends.torch": ("raysgd.train.torch", "TorchBackend TorchConfig"),
    "ray.util.sgd.v2.backends.tensorflow": ("raysgd.train.tensorflow", "TensorflowBackend TensorflowConfig"),
    "ray.util.sgd.v2.backends.horovod": ("raysgd.train.horovod", "HorovodConfig"),
    "ray.util.sgd.v2.examples.train_fashion_mnist_example": (
        "raysgd.train.examples.train_fashion_mnist_example",
        _FASHION,
    ),
    "ray.experimental.sgd.examples.train_example": (
        "raysgd.torch.examples.train_example",
        "LinearDataset data_creator model_creator optimizer_creator train_example",
    ),
}
_INSIDE_RAY = {
    "ray.tune.sample": ("ray.tune.search.sample", _SAMPLE),
    "ray.tune.suggest": (
        "ray.tune.search",
        "BasicVariantGenerator ConcurrencyLimiter Repeater SearchAlgorithm SearchGenerator Searcher create_searcher "
        "grid_search",
    ),
    "ray.tune.suggest.ax": ("ray.tune.search.ax", "AxSearch"),
    "ray.tune.suggest.basic_variant": ("ray.tune.search.basic_variant", "BasicVariantGenerator"),
    "ray.tune.suggest.bayesopt": ("ray.tune.search.bayesopt", "BayesOptSearch"),
    "ray.tune.suggest.bohb": ("ray.tune.search.bohb", "TuneBOHB"),
    "ray.tune.suggest.hebo": ("ray.tune.search.hebo", "HEBOSearch"),
    "ray.tune.suggest.hyperopt": ("ray.tune.search.hyperopt", "HyperOptSearch"),
    "ray.tune.suggest.nevergrad": ("ray.tune.search.nevergrad", "NevergradSearch"),
    "ray.tune.suggest.optuna": ("ray.tune.search.optuna", "OptunaSearch"),
    "ray.tune.suggest.repeater": ("ray.tune.search.repeater", "Repeater"),
    "ray.tune.suggest.search": ("ray.tune.search.search_algorithm", "SearchAlgorithm"),
    "ray.tune.suggest.search_generator": ("ray.tune.search.search_generator", "SearchGenerator"),
    "ray.tune.suggest.suggestion": ("ray.tune.search.searcher", "ConcurrencyLimiter Searcher"),
    "ray.tune.suggest.variant_generator": (
        "ray.tune.search.variant_generator",
        "RecursiveDependencyError format_vars generate_variants grid_search",
    ),
    "ray.tune.suggest.zoopt": ("ray.tune.search.zoopt", "ZOOptSearch"),
}
"""For each old module whose contents Ray has moved to another module: Ray's current module, and the names in it."""
_EXPERIMENTAL = "ray.experimental.sgd"
_FORMERLY = ("", ".pytorch", ".tf", ".utils")
"""Submodules of `ray.util.sgd` that were in `ray.experimental.sgd` before."""
_BESIDE_SGD = {
    "ray.util.iter": (
        "raysgd.util.iter",
        "LocalIterator ParallelIterator from_items from_iterators from_range",
    ),
}
"""For each old module that current Ray still has: raysgd's module, and the names in it.

These names are replaced only in programs that also use modules in `_SGD`. There, Ray's objects would not work together
with raysgd's.
"""

_TRAIN: dict[str, tuple[str, str]] = {
    "ray.train": (
        "raysgd.train",
        f"{_STRATEGY} {_SESSION_A} {_CONFIGS} Checkpoint DataConfig Result SyncConfig TRAIN_DATASET_KEY get_checkpoint "
        "get_context CheckpointUploadMode PreemptionInfo TrainContext TrainingFailedError "
        "get_preemption_info",
    ),
    "ray.train.backend": ("raysgd.train.backend", f"{_EXECUTOR} EncodedData TrainBackendError"),
    "ray.train.backends": ("raysgd.v2", "BackendConfig HorovodConfig TensorflowConfig TorchConfig"),
    "ray.train.backends.backend": ("raysgd.train.backend", f"{_EXECUTOR} CheckpointManager TrainBackendError"),
    "ray.train.backends.torch": ("raysgd.train.torch", "TorchBackend TorchConfig"),
    "ray.train.backends.tensorflow": ("raysgd.train.tensorflow", "TensorflowBackend TensorflowConfig"),
    "ray.train.backends.horovod": ("raysgd.train.horovod", "HorovodConfig"),
    "ray.train.batch_predictor": ("raysgd.train.batch_predictor", "BatchPredictor"),
    "ray.train.base_trainer": ("raysgd.train.base_trainer", "BaseTrainer GenDataset TrainingFailedError"),
    "ray.train.callbacks": ("raysgd.train.callbacks", f"TrainingCallback {_LOGGERS}"),
    "ray.train.callbacks.callback": ("raysgd.train.callbacks.callback", "TrainingCallback"),
    "ray.train.callbacks.logging": (
        "raysgd.train.callbacks.logging",
        "JsonLoggerCallback MLflowLoggerCallback TBXLoggerCallback TrainCallbackLogdirManager",
    ),
    "ray.train.callbacks.print": ("raysgd.train.callbacks.print", "PrintCallback"),
    "ray.train.callbacks.profile": ("raysgd.train.callbacks.profile", "TorchTensorboardProfilerCallback"),
    "ray.train.callbacks.results_preprocessors": (
        "raysgd.train.callbacks.results_preprocessors",
        "AverageResultsPreprocessor ExcludedKeysResultsPreprocessor IndexedResultsPreprocessor "
        "MaxResultsPreprocessor ResultsPreprocessor SequentialResultsPreprocessor WeightedAverageResultsPreprocessor",
    ),
    "ray.train.checkpoint": ("raysgd.train.checkpoint", "CheckpointManager CheckpointStrategy"),
    "ray.train.collective": ("raysgd.train.collective", "barrier broadcast_from_rank_zero"),
    "ray.train.constants": (
        "raysgd.train.constants",
        f"{_CONSTANTS} ALL_RESERVED_KEYS EVALUATION_DATASET_KEY MODEL_KEY PREPROCESSOR_KEY PYTORCH_PROFILER_KEY "
        "SESSION_MISUSE_LOG_ONCE_KEY TRAIN_CHECKPOINT_SUBDIR TRAIN_DATASET_KEY TRAIN_ENABLE_WORKER_SPREAD_ENV "
        "TRAIN_PLACEMENT_GROUP_TIMEOUT_S_ENV WILDCARD_KEY",
    ),
    "ray.train.context": ("raysgd.train.session", "TrainContext get_context"),
    "ray.train.data_parallel_trainer": ("raysgd.train.data_parallel_trainer", "DataParallelTrainer"),
    "ray.train.error": ("raysgd.train.error", "SessionMisuseError"),
    "ray.train.examples.train_fashion_mnist_example": (
        "raysgd.train.examples.train_fashion_mnist_example",
        _FASHION,
    ),
    "ray.train.horovod": ("raysgd.train.horovod", "HorovodConfig HorovodTrainer"),
    "ray.train.huggingface.transformers": (
        "raysgd.train.huggingface.transformers",
        "RayTrainReportCallback prepare_trainer",
    ),
    "ray.train.lightning": (
        "raysgd.train.lightning",
        "RayDDPStrategy RayFSDPStrategy RayLightningEnvironment RayTrainReportCallback prepare_trainer",
    ),
    "ray.train.predictor": ("raysgd.train.predictor", "Predictor PredictorNotSerializableException"),
    "ray.train.session": ("raysgd.train.session", f"{_SESSION_A} SessionMisuseError TrainingResultType"),
    "ray.train.tensorflow": (
        "raysgd.train.tensorflow",
        "TensorflowCheckpoint TensorflowConfig TensorflowPredictor TensorflowTrainer prepare_dataset_shard",
    ),
    "ray.train.torch": ("raysgd.train.torch", f"{_TORCH} TorchCheckpoint TorchPredictor TorchTrainer"),
    "ray.train.train_loop_utils": ("raysgd.train.train_loop_utils", _SESSION_A),
    "ray.train.trainer": (
        "raysgd.train.trainer",
        "BaseTrainer GenDataset Trainer TrainWorkerGroup TrainingFailedError TrainingIterator",
    ),
    "ray.train.utils": ("raysgd.train.utils", "construct_path"),
    "ray.train.worker_group": ("raysgd.train.worker_group", _WORKER_GROUP),
    "ray.train._internal.backend_executor": (
        "raysgd.train.backend",
        "BackendExecutor InactiveWorkerGroupError TrainBackendError TrainingWorkerError",
    ),
    "ray.train._internal.session": ("raysgd.air.session", _SESSION_C),
    "ray.train._internal.worker_group": ("raysgd.train.worker_group", _WORKER_GROUP),
    "ray.ml": ("raysgd.air", "RunConfig ScalingConfig"),
    "ray.ml.batch_predictor": ("raysgd.train.batch_predictor", "BatchPredictor"),
    "ray.ml.checkpoint": ("raysgd.air.checkpoint", "Checkpoint"),
    "ray.ml.config": ("raysgd.air.config", f"{_CONFIGS} DatasetConfig"),
    "ray.ml.constants": (
        "raysgd.air.constants",
        "EVALUATION_DATASET_KEY MODEL_KEY PREPROCESSOR_KEY TENSOR_COLUMN_NAME TRAIN_DATASET_KEY WILDCARD_KEY",
    ),
    "ray.ml.predictor": ("raysgd.train.predictor", "Predictor PredictorNotSerializableException"),
    "ray.ml.predictors.integrations.tensorflow": ("raysgd.train.tensorflow", "TensorflowPredictor"),
    "ray.ml.predictors.integrations.torch": ("raysgd.train.torch", "TorchPredictor"),
    "ray.ml.preprocessor": ("ray.data.preprocessor", "Preprocessor PreprocessorNotFittedException"),
    "ray.ml.preprocessors": ("ray.data.preprocessors", _PREPROCESSORS),
    "ray.ml.result": ("raysgd.air.result", "Result"),
    "ray.ml.train.data_parallel_trainer": ("raysgd.train.data_parallel_trainer", "DataParallelTrainer"),
    "ray.ml.train.integrations.horovod": ("raysgd.train.horovod", "HorovodTrainer"),
    "ray.ml.train.integrations.tensorflow": ("raysgd.train.tensorflow", "TensorflowTrainer"),
    "ray.ml.train.integrations.torch": ("raysgd.train.torch", "TorchTrainer"),
    "ray.ml.trainer": ("raysgd.train.base_trainer", "BaseTrainer GenDataset TrainingFailedError"),
    "ray.air": ("raysgd.air", f"{_CONFIGS} Checkpoint DatasetConfig Result"),
    "ray.air.callbacks.comet": ("raysgd.air.callbacks.comet", "CometLoggerCallback"),
    "ray.air.callbacks.keras": ("raysgd.air.callbacks.keras", "Callback ReportCheckpointCallback"),
    "ray.air.callbacks.mlflow": ("raysgd.air.callbacks.mlflow", "MLflowLoggerCallback setup_mlflow"),
    "ray.air.callbacks.wandb": ("raysgd.air.callbacks.wandb", "WandbLoggerCallback setup_wandb"),
    "ray.air.checkpoint": ("raysgd.air.checkpoint", "Checkpoint"),
    "ray.air.config": ("raysgd.air.config", f"{_CONFIGS} DatasetConfig"),
    "ray.air.constants": (
        "raysgd.air.constants",
        "EVALUATION_DATASET_KEY MAX_REPR_LENGTH MODEL_KEY PREPROCESSOR_KEY TENSOR_COLUMN_NAME TRAIN_DATASET_KEY "
        "WILDCARD_KEY",
    ),
    "ray.air.integrations.comet": ("raysgd.air.integrations.comet", "CometLoggerCallback"),
    "ray.air.integrations.keras": ("raysgd.air.integrations.keras", "Callback ReportCheckpointCallback"),
    "ray.air.integrations.mlflow": ("raysgd.air.integrations.mlflow", "MLflowLoggerCallback setup_mlflow"),
    "ray.air.integrations.wandb": ("raysgd.air.integrations.wandb", "WandbLoggerCallback setup_wandb"),
    "ray.air.result": ("raysgd.air.result", "Result"),
    "ray.air.session": ("raysgd.air.session", _SESSION_C),
    "ray.tune.result_grid": ("raysgd.tune.tuner", "ResultGrid"),
    "ray.tune.syncer": ("raysgd.air.config", "SyncConfig"),
    "ray.tune.tuner": ("raysgd.tune.tuner", "Tuner"),
}
_KEPT_BY_RAY = {
    "ray.ml": ("ray.train", "RunConfig ScalingConfig"),
    "ray.ml.checkpoint": ("ray.train", "Checkpoint"),
    "ray.ml.config": ("ray.train", "FailureConfig RunConfig ScalingConfig"),
    "ray.ml.preprocessor": _TRAIN["ray.ml.preprocessor"],
    "ray.ml.preprocessors": _TRAIN["ray.ml.preprocessors"],
    "ray.ml.result": ("ray.train", "Result"),
    "ray.ml.train.integrations.lightgbm": ("ray.train.lightgbm", "LightGBMTrainer"),
    "ray.ml.train.integrations.xgboost": ("ray.train.xgboost", "XGBoostTrainer"),
}
"""For each old module, the module of current Ray that replaces it in a program with a trainer that only Ray has."""
_GROUPS: dict[Group, dict[str, tuple[str, str]]] = {
    "sgd": {**_SGD, **_BESIDE_SGD, **_INSIDE_RAY},
    "train": _TRAIN,
}

_RENAMED = {
    "ray.util.sgd.PyTorchTrainer": "raysgd.TorchTrainer",
    "ray.util.sgd.pytorch.PyTorchTrainer": "raysgd.TorchTrainer",
    "ray.util.sgd.pytorch.pytorch_trainer.PyTorchTrainer": "raysgd.TorchTrainer",
    "ray.util.sgd.pytorch.utils.AverageMeter": "raysgd.utils.AverageMeter",
    "ray.util.sgd.v2.SGDBackendError": "raysgd.v2.SGDBackendError",
    "ray.util.ml_utils.util.find_free_port": "raysgd.utils.find_free_port",
    "ray.tune.function": "raysgd.tune.function",
    "ray.tune.trial.Trial": "ray.tune.experiment.Trial",
    "ray.services.get_node_ip_address": "ray.util.get_node_ip_address",
}
"""Old names that the tables above do not cover, each with the current name."""
_RENAMED_TRAIN = {
    "ray.tune.ResultGrid": "raysgd.tune.ResultGrid",
    "ray.tune.SyncConfig": "raysgd.air.SyncConfig",
    "ray.tune.Tuner": "raysgd.tune.Tuner",
    "ray.tune.tuner.TuneConfig": "raysgd.tune.TuneConfig",
    "ray.ml.Checkpoint": "raysgd.air.Checkpoint",
    "ray.ml.Preprocessor": "ray.data.preprocessor.Preprocessor",
    "ray.ml.trainer.Trainer": "raysgd.train.base_trainer.BaseTrainer",
    "ray.train.tensorflow._TensorflowBackend": "raysgd.train.tensorflow.TensorflowBackend",
    "ray.train.torch._TorchBackend": "raysgd.train.torch.TorchBackend",
    "ray.train._internal.checkpoint.CheckpointManager": "raysgd.train.checkpoint.CheckpointManager",
    "ray.train._internal.data_config.DataConfig": "raysgd.train.DataConfig",
    "ray.train._internal.syncer.SyncConfig": "raysgd.air.SyncConfig",
    "ray.train._internal.utils.check_for_failure": "raysgd.utils.check_for_failure",
    "ray.train._internal.utils.construct_path": "raysgd.train.utils.construct_path",
}
"""Names of the group "train" that `_TRAIN` does not cover, each with the current name."""

_NUM_NAMES = 5
RAY_TRAIN = "2.60"
"""The version of Ray for which the tables are complete: they contain every public name of its `ray.train`."""

_TRANSFORMERS = (
    "run `transformers.Trainer` in the function of a `TorchTrainer`, with what "
    "`raysgd.train.huggingface.transformers` has; the migration page says how, under `From HuggingFaceTrainer`"
)
_LIGHTNING = "run Lightning's `Trainer` in the function of a `TorchTrainer`, with what `raysgd.train.lightning` has"
_LIGHTNING_TRAINER = f"{_LIGHTNING}; the migration page says how, under `From LightningTrainer`"
_ELSEWHERE = (
    "raysgd trains with PyTorch, TensorFlow and Horovod; use Ray's own trainer, with Ray's configs: in a file with one "
    "`raysgd migrate` leaves `ray.train`, `ray.air` and `ray.tune` to Ray"
)
_REPORTED = "`Result.best_checkpoints` has the checkpoints that were kept, with their metrics"
_VALIDATION = "validate in the function before `report`, and report what you find with the checkpoint"
_INTERNAL = "it was an internal of the old library, and raysgd's internals are different"
_EXAMPLES = "see `raysgd.torch.examples`, `raysgd.tf.examples` and the folder `examples`"
_AIR_CHECKPOINT = (
    "make the checkpoint with `raysgd.train.torch.TorchCheckpoint.from_model`, and read it with `get_model`"
)
_LOOP = "override `train_epoch` or `validate` of a `TrainingOperator`, whose `super()` has the loop"
_DROPPED_SEARCH = "Ray dropped it: search with `ray.tune.search.optuna.OptunaSearch()`"
_RESOURCES = 'return `ray.tune.PlacementGroupFactory([{"CPU": 1}, {"CPU": 1}])`, with one dict for each worker'
_LIGHTNING_TESTS = "it was a helper of tests: copy the `LightningModule` into your program, where it works unchanged"
_FIRST_SGD = "train a Keras model with a `TFTrainer`, or a model of PyTorch with a `TorchTrainer`"
_PIPELINE = "pass the dataset, which is read while it is used"
_LIGHTNING_ON_RAY = (
    "make an operator of the module with `raysgd.TrainingOperator.from_ptl`, or " + _LIGHTNING + "; the migration page "
    "says how, under `From ray_lightning`"
)
_HOROVOD_ON_RAY = (
    'run the function with `raysgd.train.Trainer("horovod", num_workers=...)`; the migration page says how, under '
    "`From horovod.ray`"
)
_GONE = {
    "ray.util.sgd.pytorch.pytorch_trainer.PyTorchTrainable": "`TorchTrainer.as_trainable(...)` makes the class",
    "ray.util.sgd.pytorch.PyTorchTrainable": "`TorchTrainer.as_trainable(...)` makes the class",
    "ray.util.sgd.pytorch.distributed_pytorch_runner": _INTERNAL,
    "ray.util.sgd.pytorch.pytorch_runner": _INTERNAL,
    "ray.util.sgd.pytorch.utils.train": _LOOP,
    "ray.util.sgd.pytorch.utils.validate": _LOOP,
    "ray.experimental.sgd.mnist_example": _FIRST_SGD,
    "ray.experimental.sgd.sgd": _FIRST_SGD,
    "ray.experimental.sgd.tfbench": _FIRST_SGD,
    "ray.util.sgd.torch.torch_runner": _INTERNAL,
    "ray.util.sgd.torch.distributed_torch_runner": _INTERNAL,
    "ray.util.sgd.torch.worker_group": _INTERNAL,
    "ray.util.sgd.torch.torch_trainer.TUNE_INSTALLED": "`as_trainable` says how to install Ray Tune",
    "ray.util.sgd.tf.tf_runner": _INTERNAL,
    "ray.util.sgd.torch.examples.image_models": "`examples/image_folder.py` trains an image model in its place",
    "ray.util.sgd.torch.examples.segmentation": "`examples/proofs/segmentation.py` trains in its place, with a "
    "`SegmentationOperator`",
    "ray.util.sgd.torch.examples.transformers": "`examples/text_classification.py` trains in its place, with a "
    "`HuggingFaceOperator`",
    "ray.util.sgd.torch.torch_dataset.TorchIterableDataset": "`TorchMLDataset.get_shard` returns the iterable dataset",
    "ray.util.sgd.torch.torch_dataset.convert_to_tensor": "`TorchMLDataset` converts",
    "ray.util.sgd.torch.training_operator.amp": "`self.backward(loss)` scales the loss as the precision needs it",
    "ray.util.sgd.v2.backends.backend.TuneCheckpointManager": "`Trainer.to_tune_trainable` does what it did",
    "ray.util.sgd.v2.worker_group.BaseWorkerMixin": _INTERNAL,
    "ray.train.worker_group.BaseWorkerMixin": _INTERNAL,
    "ray.train.session.Accelerator": "what `raysgd.train.torch` prepares belongs to the run",
    "ray.train.session.get_accelerator": "what `raysgd.train.torch` prepares belongs to the run",
    "ray.train.session.set_accelerator": "what `raysgd.train.torch` prepares belongs to the run",
    "ray.train.accelerator": "what `raysgd.train.torch` prepares belongs to the run",
    "ray.train.backend.TuneCheckpointManager": "`Trainer.to_tune_trainable` does what it did",
    "ray.train.backends.backend.TuneCheckpointManager": "`Trainer.to_tune_trainable` does what it did",
    "ray.train.checkpoint.TuneCheckpointManager": "`Trainer.to_tune_trainable` does what it did",
    "ray.train._internal": _INTERNAL,
    "ray.train.CheckpointConsistencyMode": _REPORTED,
    "ray.train.ControllerError": "the driver looks after the workers: `fit` raises `TrainingFailedError` for every "
    "failure",
    "ray.train.LoggingConfig": 'call `logging.getLogger("raysgd").setLevel("WARNING")` in the driver',
    "ray.train.NCCLHangError": "a rank that hangs counts as lost, see `FailureConfig(max_failures=...)`",
    "ray.train.PreemptionError": "workers leave a node that is about to go behind the next checkpoint, and no error is "
    "raised; see `raysgd.train.get_preemption_info`",
    "ray.train.ReportedCheckpoint": _REPORTED,
    "ray.train.ReportedCheckpointStatus": _REPORTED,
    "ray.train.UserCallback": "pass a `raysgd.callbacks.Callback`, or a callback of Ray Tune, in "
    "`RunConfig(callbacks=...)`",
    "ray.train.ValidationConfig": _VALIDATION,
    "ray.train.ValidationFn": _VALIDATION,
    "ray.train.ValidationTaskConfig": _VALIDATION,
    "ray.train.WorkerGroupError": "`fit` raises `TrainingFailedError`, which is of the class of your exception too, "
    "and whose `failure.faults` has the exception of each rank",
    "ray.train.get_all_reported_checkpoints": _REPORTED,
    "ray.train.huggingface.HuggingFaceTrainer": _TRANSFORMERS,
    "ray.train.huggingface.TransformersTrainer": _TRANSFORMERS,
    "ray.train.lightning.LightningConfigBuilder": _LIGHTNING_TRAINER,
    "ray.train.lightning.LightningTrainer": _LIGHTNING_TRAINER,
    "ray.train.gbdt_trainer": _ELSEWHERE,
    "ray.train.rl": _ELSEWHERE,
    "ray.train.sklearn": _ELSEWHERE,
    "ray.train.lightning.RayDeepSpeedStrategy": "divide the model with `RayFSDPStrategy`",
    "ray.train.horovod._HorovodBackend": "pass a `raysgd.train.horovod.HorovodConfig(...)`, which makes the backend",
    "ray.ml.examples": _EXAMPLES,
    "ray.ml.preprocessors.BatchMapper": "call `map_batches` of the dataset",
    "ray.ml.predictors.integrations.huggingface": _TRANSFORMERS,
    "ray.ml.predictors.integrations.lightgbm": _ELSEWHERE,
    "ray.ml.predictors.integrations.rl": _ELSEWHERE,
    "ray.ml.predictors.integrations.sklearn": _ELSEWHERE,
    "ray.ml.predictors.integrations.xgboost": _ELSEWHERE,
    "ray.ml.train.gbdt_trainer": _ELSEWHERE,
    "ray.ml.train.integrations.huggingface": _TRANSFORMERS,
    "ray.ml.train.integrations.lightgbm": _ELSEWHERE,
    "ray.ml.train.integrations.rl": _ELSEWHERE,
    "ray.ml.train.integrations.sklearn": _ELSEWHERE,
    "ray.ml.train.integrations.torch.load_checkpoint": _AIR_CHECKPOINT,
    "ray.ml.train.integrations.torch.to_air_checkpoint": _AIR_CHECKPOINT,
    "ray.ml.train.integrations.xgboost": _ELSEWHERE,
    "ray.ml.train_test_split": "datasets have the method `train_test_split`",
    "ray.ml.utils": _INTERNAL,
    "ray.train.examples": _EXAMPLES,
    "ray.air.examples": _EXAMPLES,
    "ray.util.sgd.v2.examples": _EXAMPLES,
    "ray.train.lightgbm": _ELSEWHERE,
    "ray.train.xgboost": _ELSEWHERE,
    "ray.train.tensorflow.TensorflowCheckpoint.from_saved_model": "Keras 3 loads no SavedModel: pass a file of "
    '`model.save("model.h5")` to `from_h5`. With `TF_USE_LEGACY_KERAS=1`, write '
    "`TensorflowCheckpoint.from_model(tf.keras.models.load_model(folder))`",
    "ray.train.v2.jax": _ELSEWHERE,
    "ray.train.v2.lightgbm": _ELSEWHERE,
    "ray.train.v2.xgboost": _ELSEWHERE,
    "ray.train.v2": _INTERNAL,
    "ray.data.DatasetPipeline": _PIPELINE,
    "ray.data.dataset_pipeline": _PIPELINE,
    "ray.data.preprocessors.BatchMapper": "call `map_batches` of the dataset",
    "ray.tune.checkpoint_dir": "save into a folder, and pass `checkpoint=ray.tune.Checkpoint.from_directory(folder)` "
    "to `ray.tune.report`",
    "ray.tune.integration.horovod": "pass a `raysgd.train.horovod.HorovodTrainer` to `raysgd.tune.Tuner`",
    "ray.get_resource_ids": "Ray has `ray.get_runtime_context().get_assigned_resources()`",
    "ray.services": "it was an internal of Ray, of which `ray.util.get_node_ip_address` is left",
    "ray.tune.ray_trial_executor": "it was an internal of Ray Tune",
    "ray.tune.integration.mlflow": "Ray has it as `ray.air.integrations.mlflow`",
    "ray.tune.integration.wandb": "Ray has it as `ray.air.integrations.wandb`",
    "ray.tune.resources.Resources": _RESOURCES,
    "ray.tune.suggest.dragonfly": _DROPPED_SEARCH,
    "ray.tune.suggest.flaml": _DROPPED_SEARCH,
    "ray.tune.suggest.sigopt": _DROPPED_SEARCH,
    "ray.tune.suggest.skopt": _DROPPED_SEARCH,
    "ray.tune.trial.Resources": _RESOURCES,
    "ray.tune.track": "call `ray.tune.report({...})`",
    "horovod.ray": _HOROVOD_ON_RAY,
    "ray_lightning": _LIGHTNING_ON_RAY,
    "ray_lightning.tests": _LIGHTNING_TESTS,
    "ray_lightning.tune": "pass the trainer to `raysgd.tune.Tuner`; what the module logs goes to Tune under its own "
    'name: write `metric="ptl/val_loss"` where `TuneReportCallback({"loss": "ptl/val_loss"})` made `"loss"` of it',
    "ray.util.data.read_parquet": "read the files with Ray Data, `ray.data.read_parquet`",
    "ray.util.iter.from_actors": "shards are no longer actors: use `raysgd.util.iter.from_iterators`",
}


@dataclass(frozen=True)
class NewPlace:
    """The current name for an old name, or the reason why there is none.

    Attributes:
        old: The old name, including its module.
        new: The current name, including its module. None if there is none.
        reason: If there is no current name, why, and what to use instead.
        module: The module to import for the current name.
        is_listed: False if the old name is in an old module but not in the tables, such as an internal name of the old
            library. Programs should not use such names.
    """

    old: str
    new: str | None
    reason: str = ""
    module: str = ""
    is_listed: bool = True

    @property
    def is_trainer_of_ray(self) -> bool:
        """True if the old name is a trainer that only Ray has, or a part of one. Such a trainer needs Ray's configs."""
        return self.reason == _ELSEWHERE


class Paths:
    """The table of old and new names, with the entries that apply to one program.

    Args:
        ray_train: True if `ray.train` and `ray.air` in the program mean the old library, not current Ray.
        beside_sgd: True if the program uses `ray.util.sgd` or another module that Ray no longer has.
        keeps_ray_train: True if all of `ray.train` and `ray.air` in the program must stay Ray's, because the program
            uses a trainer that only Ray has.
    """

    def __init__(self, ray_train: bool = False, beside_sgd: bool = True, keeps_ray_train: bool = False) -> None:
        self._keeps_ray_train = keeps_ray_train
        self._modules = {**_SGD, **_INSIDE_RAY, **(_BESIDE_SGD if beside_sgd else {}), **(_TRAIN if ray_train else {})}
        self._modules.update(_KEPT_BY_RAY if keeps_ray_train else {})
        self._renamed = {**_RENAMED, **(_RENAMED_TRAIN if ray_train else {})}
        self._packages = {package for module, _ in self.modules() for package in _packages_of(module)}

    def find(self, old: str) -> NewPlace | None:
        """Return the table's entry for a dotted name, or None if the dotted name does not belong to the old library.

        For an attribute of a class, such as `TorchTrainer.train`, the entry has the class's current name with the
        attribute.
        """
        if old in self._modules:
            return NewPlace(old, self._modules[old][0], module=self._modules[old][0])
        for known, rest in _cuts(old):
            if (place := self._single(known)) is not None:
                return NewPlace(old, place.new and f"{place.new}{rest}", place.reason, place.module)
            if known in self._modules:
                return self._inside(old, known)
        if f"{old}.".startswith(f"{_EXPERIMENTAL}."):
            place = self.find(old.replace(_EXPERIMENTAL, "ray.util.sgd", 1))
            return place and replace(place, old=old)
        return None

    def today(self, name: str) -> str:
        """Return the current name for a dotted name, or the dotted name itself if the table has no current name."""
        place = self.find(name)
        return (place and place.new) or name

    def is_of_ray(self, module: str) -> bool:
        """Return True if a module name can only mean a module of current Ray, not one of the old library."""
        means_two = _means_two(module) and not self._keeps_ray_train
        return self.find(module) is None and not self.is_package(module) and not means_two

    def is_package(self, old: str) -> bool:
        """Return True if the table has modules inside the package with this name."""
        return old in self._packages

    def modules(self) -> Iterator[tuple[str, str]]:
        """Yield the names of all old modules, each with the name of the current module."""
        for old, (new, _) in self._modules.items():
            yield old, new
            part = old.removeprefix("ray.util.sgd")
            if part != old and any(part == each or (each and part.startswith(f"{each}.")) for each in _FORMERLY):
                yield f"{_EXPERIMENTAL}{part}", new

    def _single(self, name: str) -> NewPlace | None:
        module, _, last = name.rpartition(".")
        new_module, names = self._modules.get(module, ("", ""))
        if last in names.split():
            return NewPlace(name, f"{new_module}.{last}", module=new_module)
        if name in self._renamed:
            return NewPlace(name, self._renamed[name], module=self._renamed[name].rpartition(".")[0])
        return NewPlace(name, None, _GONE[name]) if name in _GONE and self._knows(name) else None

    def _knows(self, name: str) -> bool:
        if _means_two(name):
            return "ray.train" in self._modules
        return not name.startswith("ray.util.iter") or "ray.util.iter" in self._modules

    def _inside(self, old: str, module: str) -> NewPlace | None:
        """Return an entry for a name that the table does not list under its old module.

        The table may list `module.Name`, while the program uses `module.submodule.Name`. In that case, the entry has
        the current name for `module.Name`. Otherwise, the entry says that raysgd lacks the name. Return None for a name
        that belongs to current Ray.

        Args:
            old: The old name.
            module: The old module, which is a prefix of `old`.
        """
        new, names = self._modules[module]
        inside = old.removeprefix(f"{module}.")
        for known, rest in _cuts(inside):
            name = known.rpartition(".")[2]
            if self._single(f"{module}.{name}") is not None:
                place = self.find(f"{module}.{name}{rest}")
                return place and replace(place, old=old)
        if module in _TRAIN and module.startswith("ray.tune."):
            return None  # the names in these modules that the table does not list belong to current Ray
        return NewPlace(old, None, _has(new, module, names.split(), inside), is_listed=False)


def _has(new: str, module: str, names: Sequence[str], missing: str) -> str:
    """Return a phrase for an error message about a name that raysgd lacks. The phrase lists names that raysgd has.

    Args:
        new: The current module.
        module: The old module.
        names: Names of the old module that raysgd has.
        missing: The missing name. Similar names are listed, or the first few if no name is similar.
    """
    some = get_close_matches(missing.rpartition(".")[2], names, cutoff=0.5) or names[:_NUM_NAMES]
    if not some:
        return f"`{new}` has none of its names, and raysgd has no internals of the old library"
    listed = ", ".join(f"`{name}`" for name in some)
    others = "" if len(some) == len(names) else f" and {len(names) - len(some)} more"
    return f"of `{module}` raysgd has {listed}{others}, and no internals"


def _means_two(name: str) -> bool:
    """Return True if a name may mean something in the old library and something else in current Ray."""
    return name.startswith(("ray.train", "ray.air", "ray.ml"))


def table(group: Group) -> list[tuple[str, str, str]]:
    """Return three strings for each old module of a group: the old module, the current one, and the names in both.

    The names are separated by spaces.
    """
    return [(old, new, names) for old, (new, names) in _GROUPS[group].items()]


def gone() -> dict[str, str]:
    """Return the old names for which raysgd has no current name, each with the reason and what to use instead."""
    return dict(_GONE)


def renamed() -> dict[str, str]:
    """Return the old names that have a current name but are not listed by `table`, each with the current name."""
    return {**_RENAMED, **_RENAMED_TRAIN}


def _cuts(name: str) -> Iterator[tuple[str, str]]:
    """Yield each way to split a dotted name into a prefix and the remainder, starting with the longest prefix."""
    parts = name.split(".")
    for end in range(len(parts), 0, -1):
        yield ".".join(parts[:end]), "".join(f".{part}" for part in parts[end:])


def _packages_of(module: str) -> Iterator[str]:
    parts = module.split(".")
    return (".".join(parts[:end]) for end in range(1, len(parts)))
