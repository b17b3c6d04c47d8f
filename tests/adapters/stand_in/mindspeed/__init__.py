"""Stand-in for MindSpeed."""
