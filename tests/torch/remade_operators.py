"""Operators with a frozen base, which `setup` makes again."""

from __future__ import annotations

from typing import Any

import torch

from tests.torch.operators_for_tests import NUM_FEATURES, LinearOperator, setting


class Adapter(torch.nn.Module):
    """A frozen base with a batch norm, and a small adapter beside it."""

    def __init__(self, seed: int, width: int, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.base = torch.nn.Sequential(torch.nn.Linear(NUM_FEATURES, width), torch.nn.Linear(width, 1))
        for parameter in self.base.parameters():
            parameter.data = torch.randn(parameter.shape, generator=generator).to(dtype) / width**0.5
        self.base.requires_grad_(False)
        self.norm = torch.nn.BatchNorm1d(NUM_FEATURES)
        self.adapter = torch.nn.Linear(NUM_FEATURES, 1)

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        own = self.base(features.to(self.base[0].weight.dtype)).float()  # type: ignore[operator]
        return own + self.adapter(self.norm(features))


class Adapted(LinearOperator):
    """Trains the adapter, and says so."""

    excludes_frozen_from_state = True

    def make_model(self) -> torch.nn.Module:
        config = self.config
        return Adapter(config.get("base", 0), config.get("width", 64), config.get("dtype", torch.float32))

    def register(self, **parts: Any) -> Any:
        model = parts["models"]
        trained = [each for each in model.parameters() if each.requires_grad]
        optimizer = torch.optim.Adam(trained, lr=setting(self.config, "lr"))
        return super().register(**{**parts, "optimizers": optimizer})


class Plain(Adapted):
    """The same without a word."""

    excludes_frozen_from_state = False
