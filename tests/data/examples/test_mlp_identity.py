"""The example module `raysgd.data.examples.mlp_identity`, which user code imports from."""

from __future__ import annotations

import pytest
import torch

from raysgd.data.examples.mlp_identity import Net, dataset_creator, main, model_creator, optimizer_creator, to_mat


def test_a_number_becomes_a_matrix() -> None:
    assert to_mat(0.25).tolist() == [[0.25]]
    assert Net()(to_mat(0.25)).shape == (1, 1)


def test_the_points_are_dealt_in_batches_of_their_own_labels() -> None:
    dataset = dataset_creator()
    dataset.set_num_shards(1)
    [batch] = dataset.get_shard(0).take(1)
    assert len(batch) == 32
    assert all(torch.equal(x, y) for x, y in batch)


def test_the_creators_make_a_model_and_its_optimizer() -> None:
    model = model_creator({})
    assert optimizer_creator(model, {}).defaults["lr"] == 1e-4
    assert sum(parameter.numel() for parameter in model.parameters()) == 128 * 2 + 129


@pytest.mark.soak
@pytest.mark.integration
def test_the_identity_is_learned(ray_cluster: None) -> None:
    assert main(num_workers=2, num_steps=100) == pytest.approx(0.5, abs=0.05)
