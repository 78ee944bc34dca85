"""Step 4: what a shard returns leaves it; written states are merged by their own policies and checked."""
