"""Changes of the group over its life: starts, losses, growth, and what is watched while a call runs."""
