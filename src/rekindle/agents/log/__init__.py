"""What happened in coordination sessions, as rows of a file that verify themselves, and what it may take."""
