"""What is made from the code in docs/: the settings, the HTTP interface."""
