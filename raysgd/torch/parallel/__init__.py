"""Ways to keep the copies of a model equal: DDP, FSDP, Horovod, and what they exchange."""
