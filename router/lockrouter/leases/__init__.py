"""Leases: durable locks, one row per key, that need no connection while they are held."""
