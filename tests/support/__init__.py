"""What several tests use, and the programs of the processes that they start."""
