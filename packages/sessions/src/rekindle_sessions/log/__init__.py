"""The file of coordination sessions: their events as rows authenticated by MACs, and quotas on its size."""
