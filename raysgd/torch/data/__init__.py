"""PyTorch loaders and datasets: how they are sharded over the workers, and the position in them."""
