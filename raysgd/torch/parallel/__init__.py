"""Strategies that keep the replicas of a model in sync (DDP, FSDP and Horovod), and the communication between ranks."""
