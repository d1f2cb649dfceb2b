"""The modules of `raysgd.air.integrations`, where Ray 2.0 had them."""
