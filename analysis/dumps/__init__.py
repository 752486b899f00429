"""Two folders of tensors that other tools dumped: read as data, matched by name, compared."""
