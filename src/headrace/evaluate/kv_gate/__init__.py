"""The gate of KV precision: is a coarser KV cache good enough for this model."""
