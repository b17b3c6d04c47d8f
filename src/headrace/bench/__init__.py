"""TODO(first light): see ARCHITECTURE.md."""
