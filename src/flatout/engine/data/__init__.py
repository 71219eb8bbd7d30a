"""Raw texts in: read, check, reject with a reason, split."""
