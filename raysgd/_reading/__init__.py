"""Files that may come from anyone: read without running what is in them."""
