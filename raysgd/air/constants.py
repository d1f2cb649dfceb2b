"""Names used in checkpoints and results. Programs written for Ray AIR may import them."""

from __future__ import annotations

# Keys of a checkpoint's dict.
PREPROCESSOR_KEY = "_preprocessor"
MODEL_KEY = "model"

# Names of datasets. By default, trainers shard only "train". As a key of `dataset_config`, "*" stands for all names
# without an entry of their own.
TRAIN_DATASET_KEY = "train"
EVALUATION_DATASET_KEY = "evaluation"
WILDCARD_KEY = "*"

# The column name of tensors in Ray AIR 2.0, and the maximum length of a trainer's `repr`. raysgd itself does not use
# the column name.
TENSOR_COLUMN_NAME = "__value__"
MAX_REPR_LENGTH = 120

# Files in the folder of a trial.
RESULT_FILE = "result.json"
ERROR_FILE = "error.txt"
ERROR_PICKLE_FILE = "error.pkl"

# Ray Tune loggers that write the same files as raysgd. Passing one in `RunConfig(callbacks=...)` replaces raysgd's
# writer for that file.
JSON_LOGGER, CSV_LOGGER, TENSORBOARD_LOGGER = DEFAULT_LOGGERS = (
    "JsonLoggerCallback",
    "CSVLoggerCallback",
    "TBXLoggerCallback",
)

# Keys that raysgd adds to the reports of `Trainer.run`.
TIMESTAMP = "_timestamp"
TIME_THIS_ITER_S = "_time_this_iter_s"
TRAINING_ITERATION = "_training_iteration"
