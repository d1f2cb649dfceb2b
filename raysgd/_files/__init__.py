"""Files of this machine: written whole or not at all, and refused where they are something else."""
