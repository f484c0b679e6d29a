"""Sans-I/O: the bytes of the MySQL protocol that occur here, and operations written once as generators."""
