"""What the programs that measure have in common: a server process and its client, figures with their origin, plots."""
