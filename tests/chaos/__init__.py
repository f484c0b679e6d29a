"""The chaos run: random faults, everything the router can do, eight processes, and the invariants at the end."""
