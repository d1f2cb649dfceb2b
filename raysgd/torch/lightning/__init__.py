"""What there is to know about a LightningModule."""
