"""What operators do to a topology's databases: create, seed, verify. Never on the path of a lock."""
