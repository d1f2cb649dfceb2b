from __future__ import annotations

import pytest
import torch

from raysgd.torch.examples.train_example import (
    LinearDataset,
    data_creator,
    model_creator,
    optimizer_creator,
    scheduler_creator,
    train_example,
)


@pytest.mark.parametrize("size", [1, 7, 400, 1000])
def test_the_points_are_evenly_spaced_below_ten_and_on_the_line(size: int) -> None:
    data = LinearDataset(2, 5, size=size)
    assert len(data) == size
    x, y = torch.cat([data[i][0] for i in range(size)]), torch.cat([data[i][1] for i in range(size)])
    assert (x.dtype, x[0].item(), bool((x < 10).all())) == (torch.float32, 0.0, True)
    torch.testing.assert_close(x, torch.arange(size) * 10 / size)
    torch.testing.assert_close(y, 2 * x + 5)


def test_the_creators_have_defaults() -> None:
    model = model_creator({})
    optimizer = optimizer_creator(model, {})
    train, validation = data_creator({})
    assert model.weight.shape == (1, 1)
    assert (type(optimizer), optimizer.defaults["lr"]) == (torch.optim.SGD, 0.01)
    scheduler = scheduler_creator(optimizer, {})
    assert (type(scheduler), scheduler.step_size, scheduler.gamma) == (torch.optim.lr_scheduler.StepLR, 5, 0.9)
    assert (len(train.dataset), len(validation.dataset), train.batch_size, validation.batch_size) == (1000, 400, 32, 32)  # type: ignore[arg-type]
    assert next(iter(train))[0][:2].flatten().tolist() == pytest.approx([0.0, 0.01])


@pytest.mark.integration
def test_the_line_is_found(ray_cluster: None, capsys: pytest.CaptureFixture[str]) -> None:
    train_example()
    *_, last = capsys.readouterr().out.splitlines()
    weight, bias = last.removeprefix("trained weight: ").split(", bias: ")
    assert float(weight) == pytest.approx(2, abs=0.3)
    assert float(bias) == pytest.approx(5, abs=1.5)
