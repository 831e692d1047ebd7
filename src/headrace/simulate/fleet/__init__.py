"""Many replicas behind one gateway on the virtual clock."""
