"""Step times of hardware that one does not own: computed from its data sheet, or read from measured kernels."""
