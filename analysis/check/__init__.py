"""Check whether two passes can be compared, and name the fault if they cannot."""
