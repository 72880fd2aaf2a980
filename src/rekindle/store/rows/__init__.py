"""The index: its rows, the slots, covers and order of eviction, and how lost rows are recovered."""
