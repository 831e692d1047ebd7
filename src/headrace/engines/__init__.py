"""Things that generate tokens, behind one narrow seam (``engines.protocol``)."""
