"""Two runs side by side: what differs first between them."""
