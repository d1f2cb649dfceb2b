"""What every trainer stands on: the engine, how workers are connected, and helpers that know no framework."""
