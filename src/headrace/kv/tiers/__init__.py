"""KV blocks that outlive their stream: stores in RAM and on disk, and what is kept in them."""
