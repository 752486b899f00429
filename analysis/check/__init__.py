"""Check whether two passes may be compared, and name the fault if not."""
