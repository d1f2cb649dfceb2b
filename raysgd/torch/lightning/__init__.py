"""Helpers of `LightningOperator`: call a `LightningModule`'s hooks, and collect the values that it logs."""
