"""What agents remember, on the intake's thread: their branches, pins and breakpoints, and what is forgotten."""
