"""Charts for papers: PNG, SVG, PDF and CSV."""
