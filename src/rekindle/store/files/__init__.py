"""Files and directories: records in shards, SQLite files and their tables, locks, secrets, syncs. Knows no index."""
