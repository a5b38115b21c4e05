"""What runs left on disk, read again: the hash chain, the checks of one run, the comparison of all, and the report."""
