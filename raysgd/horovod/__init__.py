"""Horovod for current PyTorch: a command that builds Horovod and installs it into the running environment.

    python -m raysgd.horovod.install

The last release of Horovod cannot be compiled with a recent PyTorch. The command downloads Horovod's source package,
patches the few lines that do not compile or that fail at run time, builds a wheel with Gloo, and caches the wheel for
the next installation.

This package only installs Horovod. `raysgd.core.connections.horovod` connects workers with Horovod, and
`raysgd.torch.parallel.horovod_parallel` averages gradients with it.
"""
