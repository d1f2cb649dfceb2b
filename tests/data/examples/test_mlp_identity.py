"""The example modules about the identity, which user code imports from.

`tests/contracts` trains with the creators of `mlp_identity`.
"""

from __future__ import annotations

import pytest
import torch

from raysgd.data.examples import mlp_identity, mlp_identity_tf, mlp_identity_torch
from raysgd.torch import TorchTrainer


def test_frames_have_each_number_and_its_label() -> None:
    dataset = mlp_identity_torch.dataset_creator(2)
    [frame] = dataset.get_shard(0).take(1)
    assert list(frame.columns) == [0, 1]
    assert (frame[0] == frame[1]).all()
    assert dataset.num_shards() == 2


def test_the_operator_learns_the_identity() -> None:
    dataset = mlp_identity_torch.dataset_creator(1).to_torch(feature_columns=[0], label_column=1)
    operator_cls = mlp_identity_torch.make_train_operator(dataset)
    config = {"batch_size": 32, "lr": 0.1}
    with TorchTrainer(
        training_operator_cls=operator_cls, config=config, use_local=True, add_dist_sampler=False
    ) as trainer:
        losses = [trainer.train(num_steps=50)["train_loss"] for _ in range(2)]
        assert isinstance(trainer.get_model(), mlp_identity_torch.Net)
    assert losses[1] < losses[0]


@pytest.mark.soak
def test_the_data_creator_reads_all_shards_where_there_is_one_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    class Shards:
        def get_shard(self, shard_index: int) -> object:
            import tensorflow as tf

            asked.append(shard_index)
            return tf.data.Dataset.from_tensor_slices(torch.arange(3).numpy())

    data_creator = mlp_identity_tf.make_data_creator(Shards())
    monkeypatch.delenv("TF_CONFIG", raising=False)
    train, validation = data_creator({"batch_size": 2})
    assert [batch.tolist() for batch in train.take(3).as_numpy_iterator()] == [[0, 1], [2], [0, 1]]
    assert validation is None
    monkeypatch.setenv("TF_CONFIG", '{"task": {"type": "worker", "index": 1}}')
    data_creator({"batch_size": 2})
    assert asked == [-1, 1]


@pytest.mark.soak
@pytest.mark.integration
def test_all_learn_on_two_workers(ray_cluster: None) -> None:
    assert mlp_identity.main(num_workers=2, num_steps=100) == pytest.approx(0.5, abs=0.05)
    assert mlp_identity_torch.main() == pytest.approx(0.5, abs=0.05)
    assert mlp_identity_tf.main() == pytest.approx(0.5, abs=0.05)
