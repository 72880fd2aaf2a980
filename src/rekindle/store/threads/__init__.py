"""The writer and the readers, and the blocks that wait for them."""
