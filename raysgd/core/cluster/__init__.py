"""Ray's cluster and this process in it: sessions, nodes, resources and GPUs, the program's end, lines to workers."""
