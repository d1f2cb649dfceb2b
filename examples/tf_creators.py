"""Fits a line with Keras's own `fit` on two workers, in the style of the old library: two creator functions.

Data: points on the line y = x / 2, made up. The creator functions are in `raysgd.tf.examples.tensorflow_train_example`;
each takes the config, and one returns a compiled model, the other the data to train on and to test on.
"""

from __future__ import annotations

from typing import Any

from _common import one_process_then_workers, parse_arguments, print_result, ray_running

from raysgd import TFTrainer
from raysgd.tf.examples.tensorflow_train_example import create_config, simple_dataset, simple_model

BATCH = 128


def train_example(num_epochs: int, **options: Any) -> dict[str, float]:
    """Returns the results of the last epoch."""
    with TFTrainer(simple_model, simple_dataset, config=create_config(BATCH), seed=0, **options) as trainer:
        for epoch in range(num_epochs):
            results = {**trainer.train(), **trainer.validate()}
            print(f"epoch {epoch}: " + ", ".join(f"{name} {value:.4f}" for name, value in results.items()), flush=True)
    return results


def main() -> None:
    args = parse_arguments(__doc__)
    num_epochs = 2 if args.smoke_test else 5
    with ray_running(args):
        found = [train_example(num_epochs, **options) for options in one_process_then_workers(args)]
    alone = found[0]["validation_loss"]
    print_result(args, **found[-1], validation_loss_of_one_process=alone, epochs=num_epochs)


if __name__ == "__main__":
    main()
