"""Horovod for current PyTorch: a command that builds Horovod and installs it into the running environment.

    python -m raysgd.horovod.install

Horovod's last release does not build with a recent PyTorch. The command fetches its source package, patches the few
lines that prevent this, builds it with Gloo, and caches the result, so that it is built only once. This package only
installs Horovod. `raysgd.core.connections.horovod` connects workers with it, and
`raysgd.torch.parallel.horovod_parallel` averages gradients.
"""
