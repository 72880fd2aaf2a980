"""The engine thread: scheduling, forward steps one after the other, replies as they are sampled."""
