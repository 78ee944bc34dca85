"""Many states in few arrays."""
