from __future__ import annotations

from collections.abc import Iterator

import pytest

from raysgd.detached import cluster


@pytest.fixture
def address(ray_cluster: None) -> Iterator[str]:
    """The address of Ray. In the end, trainers that are left are ended."""
    import ray

    yield str(ray.get_runtime_context().gcs_address)
    for name in cluster._names():
        cluster._stop(name, cluster.find(name))
