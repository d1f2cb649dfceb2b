"""Arrays and batches without a framework: nested, divided, put together again."""
