"""What `raysgd.air.integrations` has, where Ray 2.0 had it."""
