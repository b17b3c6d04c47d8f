"""Stand-in for MindSpeed-LLM."""
