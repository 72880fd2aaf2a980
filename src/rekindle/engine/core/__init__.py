"""The engine's thread: what runs next, one forward step after the other, replies as they are sampled."""
