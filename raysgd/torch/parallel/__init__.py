"""How the copies of a model are kept equal: DDP, FSDP, Horovod, and what they exchange."""
