"""What agents remember, on the intake thread: their branches, pins and breakpoints, and what is forgotten."""
