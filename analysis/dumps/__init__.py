"""Comparison of two folders of tensors dumped by other tools. Files are read as data, and tensors are matched by name."""
