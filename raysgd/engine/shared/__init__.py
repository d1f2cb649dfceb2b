"""Data and protocols that all parts of the engine share; each of them may travel to a worker."""
