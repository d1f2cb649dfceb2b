"""Files from anyone: they are read without running code in them."""
