"""TensorFlow datasets: sharding over the workers, and positions in them."""
