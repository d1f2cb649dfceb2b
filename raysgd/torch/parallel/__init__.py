"""Strategies that keep the workers' models in sync (DDP, FSDP and Horovod), and the communication between workers."""
