"""Ray 2.3: Ray AIR, a sweep with a search space and ASHA, interrupted and restored."""
# ray_train

import os

import ray
import torch
from ray import tune
from ray.air import Checkpoint, session
from ray.air.config import CheckpointConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer, prepare_model
from ray.tune import TuneConfig, TuneError
from ray.tune.schedulers import ASHAScheduler
from ray.tune.tuner import Tuner


def loop(config):
    checkpoint = session.get_checkpoint()
    first = checkpoint.to_dict()["epoch"] + 1 if checkpoint else 0
    model = prepare_model(torch.nn.Linear(1, 1))
    if checkpoint:
        model.load_state_dict(checkpoint.to_dict()["model"])
    optimizer = torch.optim.SGD(model.parameters(), lr=config["lr"])
    x = torch.linspace(-1, 1, 32).reshape(-1, 1)
    for epoch in range(first, 4):
        if config["lr"] > 0.15 and epoch == 2 and not os.path.exists(config["mark"]):
            open(config["mark"], "w").close()
            raise ValueError("the machine went away")
        loss = ((model(x) - 2 * x) ** 2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        state = Checkpoint.from_dict({"epoch": epoch, "model": model.state_dict()})
        session.report({"loss": loss.item(), "epoch": epoch, "first": first}, checkpoint=state)


ray.init(num_cpus=3, include_dashboard=False, ignore_reinit_error=True)
trainer = TorchTrainer(
    loop, train_loop_config={"mark": os.path.abspath("mark")}, scaling_config=ScalingConfig(num_workers=1)
)
tuner = Tuner(
    trainer,
    param_space={"train_loop_config": {"lr": tune.grid_search([0.1, 0.2])}},
    tune_config=TuneConfig(
        metric="loss", mode="min", scheduler=ASHAScheduler(max_t=10, grace_period=8), max_concurrent_trials=1
    ),
    run_config=RunConfig(
        name="sweep", local_dir=os.path.abspath("results"), checkpoint_config=CheckpointConfig(num_to_keep=1)
    ),
)
results = tuner.fit()
assert results.num_errors == 1
tuner = tune.Tuner.restore(os.path.abspath("results/sweep"), resume_errored=True)
results = tuner.fit()
assert results.num_errors == 0
best = results.get_best_result()
assert isinstance(results, tune.ResultGrid)
assert {result.metrics["first"] for result in results} == {0, 2}
for loss in results[0].metrics_dataframe["loss"]:
    print("loss", loss)
assert best.checkpoint.to_dict()["epoch"] == 3
try:
    TorchTrainer(loop, train_loop_config={"mark": "/no", "lr": 0.2}, scaling_config=ScalingConfig(num_workers=1)).fit()
except TuneError as error:
    print("caught", type(error).__name__)
