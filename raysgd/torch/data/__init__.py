"""PyTorch loaders and datasets: sharding over the workers, and resuming in the middle of an epoch."""
