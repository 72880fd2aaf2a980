"""The object tier: records and agents' heads in an object store that several replicas share. Knows no requests."""
