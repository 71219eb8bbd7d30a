"""Convert raw samples of a fixed shape (numbers or images) to Arrow rows."""
