"""The modules of `raysgd.air.integrations`, under their names in Ray 2.0."""
