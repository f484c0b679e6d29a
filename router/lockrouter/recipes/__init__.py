"""What services build on leases, ready-made: once, guard, election, semaphore. See README.md beside this file."""
