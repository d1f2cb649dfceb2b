"""Fits a line with Keras's own `fit` on two workers, in the style of the old library: two creator functions.

Data: points on the line y = x / 2, made up. The creator functions are in `raysgd.tf.examples.tensorflow_train_example`;
each takes the config, and one returns a compiled model, the other the data to train on and to test on.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # before TensorFlow is imported: it says a lot otherwise

import numpy as np
import ray

from raysgd import TFTrainer
from raysgd.tf.examples.tensorflow_train_example import create_config, simple_dataset, simple_model

BATCH = 128


def train_example(num_replicas: int, use_gpu: bool, num_epochs: int) -> dict[str, float]:
    trainer = TFTrainer(
        model_creator=simple_model,
        data_creator=simple_dataset,
        config=create_config(BATCH),
        num_replicas=num_replicas,
        use_gpu=use_gpu,
    )
    for epoch in range(num_epochs):
        results = {**trainer.train(), **trainer.validate()}
        print(f"epoch {epoch}: " + ", ".join(f"{name} {value:.4f}" for name, value in results.items()), flush=True)
    prediction = trainer.get_model().predict(np.array([[0.5]]), verbose=0)
    print(f"half of 0.5 is about {prediction[0, 0]:.3f}")
    trainer.shutdown()
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--num-workers", type=int, default=2, help="processes that train together (default: 2)")
    parser.add_argument("--use-gpu", action="store_true", help="give each worker a GPU")
    parser.add_argument("--smoke-test", action="store_true", help="only one epoch, to see that it runs")
    parser.add_argument("--address", help="a running Ray cluster, for example `auto` (default: start one)")
    args = parser.parse_args()
    num_epochs = 1 if args.smoke_test else 5
    options: dict[str, Any] = {"logging_level": logging.ERROR, "log_to_driver": False}
    if args.address is None:
        options.update(num_cpus=max(args.num_workers, os.cpu_count() or 1), include_dashboard=False)
    ray.init(address=args.address or "local", **options)
    results = train_example(args.num_workers, args.use_gpu, num_epochs)
    ray.shutdown()
    print(json.dumps({**results, "num_workers": args.num_workers, "epochs": num_epochs}))


if __name__ == "__main__":
    main()
