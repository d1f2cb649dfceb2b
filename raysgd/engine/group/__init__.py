"""The worker group: all workers as one, from its start to the questions that survivors answer."""
