"""Horovod for today's PyTorch: a command that builds it and installs it into the running environment.

    python -m raysgd.horovod.install

Horovod's last release does not build against a recent PyTorch as it is. The command fetches its source package, mends
the few lines that are in the way, builds it with Gloo and keeps the result, so that it is built once. What uses Horovod
is elsewhere: `raysgd.connections.horovod` connects workers, and `raysgd.torch.parallel.horovod_parallel` averages
gradients.
"""
