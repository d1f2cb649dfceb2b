"""What the library needs to know about a `LightningModule`."""
