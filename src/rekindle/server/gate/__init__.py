"""Who may come in: keys and namespaces, the hosts that are asked for, how much at once and how often."""
