"""PyTorch loaders and datasets: how they are divided over the workers, and the position in them."""
