"""Check whether two passes can be compared, and identify the fault if they cannot."""
