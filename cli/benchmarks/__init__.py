"""What `shoal bench` measures, one part per file. See `parts.py` for the list."""
