"""What each step does: pure decisions over plain state, run by the embedded engine and, on a virtual
clock, by tests and the simulator."""
