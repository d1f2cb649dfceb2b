"""Facts about a LightningModule."""
