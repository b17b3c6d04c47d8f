"""headrace: one reader per model replica and host, every rank fed from lock-free shared memory."""
