"""Strategies that keep the replicas of a model equal: DDP, FSDP and Horovod, with the exchanges between ranks."""
