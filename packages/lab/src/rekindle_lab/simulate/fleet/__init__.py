"""Fleets: replicas with queues, routes between them, and a tier that they share."""
